"""Scenarios for an environment with nothing but Celery and Redis's client: ``python -m`` this.

The names of scenarios are the arguments. Where the broker, the record and the lock server are, the
environment says, for this process and for the worker alike. A run that takes too long ends by itself
and says where it stood.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import celery
from celery import chord

from celery_dflock import LockNotAcquiredError, Skipped, dflock
from tests.celery_dflock import jobs
from tests.celery_dflock.record import RECORD, Record

PATIENCE = 30.0
BOUND = 90.0
"""Seconds for all scenarios."""


@functools.cache
def _record() -> Record:
    return Record(os.environ[RECORD])


def events(**wanted: Any) -> list[dict[str, Any]]:
    return _record().events(**wanted)


def wait_events(number: int, **wanted: Any) -> list[dict[str, Any]]:
    deadline = time.monotonic() + PATIENCE
    while len(found := events(**wanted)) < number:
        assert time.monotonic() < deadline, f"{number} events {wanted}: {found}"
        time.sleep(0.01)
    return found


def held(key: str) -> Any:
    return dflock(key, timeout=0, app=jobs.app)


def turns() -> None:
    sent = [jobs.patient.delay(key="turns", seconds=0.05) for _ in range(6)]
    assert [r.get(timeout=PATIENCE) for r in sent] == [r.id for r in sent]
    starts = sorted(e["at"] for e in events(what="start", key="turns"))
    ends = sorted(e["at"] for e in events(what="end", key="turns"))
    assert len(starts) == len(ends) == 6
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    pids = {e["pid"] for e in events(what="asked", task="patient")}
    assert len(pids) == 2, f"not more than one process took part: {pids}"


def requeue() -> None:
    with held("requeue"):
        header = [jobs.requeued.s(key="requeue") for _ in range(3)]
        sent = chord(header)(jobs.collect.s(key="requeue"))
        wait_events(6, what="requeued", key="requeue")
        assert not events(what="start", key="requeue")
    results = sent.get(timeout=PATIENCE)
    started = events(what="start", key="requeue")
    assert sorted(results) == sorted(e["id"] for e in started)
    assert len({e["id"] for e in started}) == len(started) == 3
    assert {e["retries"] for e in started} == {0}


def skip() -> None:
    with held("skip"):
        sent = jobs.skipped.delay(key="skip")
        skipped = Skipped.of(sent.get(timeout=PATIENCE))
        assert skipped is not None
        assert (skipped.key, skipped.task_id) == ("skip", sent.id)
        assert sent.state == "SUCCESS"
    assert not events(what="start", key="skip")


def fail() -> None:
    with held("fail"):
        sent = jobs.failed.delay(key="fail")
        error = sent.get(timeout=PATIENCE, propagate=False)
        assert isinstance(error, LockNotAcquiredError), repr(error)
        assert error.key == "fail"
    assert not events(what="start", key="fail")
    assert len(events(what="asked", key="fail")) == 1, "it was retried"


def parked() -> None:
    with held("parked"):
        sent = [jobs.parked.delay(key="parked") for _ in range(5)]
        other = jobs.parked.apply_async((), {"key": "parked-other"}, countdown=0.2)
        assert other.get(timeout=PATIENCE) == other.id
        assert not events(what="start", key="parked")
    assert [r.get(timeout=PATIENCE) for r in sent] == [r.id for r in sent]
    # In the order of being sent, but for one that had no process when its turn came.
    started = [e["id"] for e in events(what="start", key="parked")]
    assert sorted(started) == sorted(r.id for r in sent), started
    slow = [jobs.parked_slowly.delay(key="parked-slowly") for _ in range(3)]
    assert [r.get(timeout=PATIENCE) for r in slow] == [r.id for r in slow]


SCENARIOS: dict[str, Callable[[], None]] = {
    "turns": turns,
    "requeue": requeue,
    "skip": skip,
    "fail": fail,
    "parked": parked,
}


def main() -> None:
    # The finaliser of a result unsubscribes from Redis under a lock that subscribing holds: it hangs if
    # the collector runs it there (celery issue 10477). So it runs where nothing is under way.
    gc.disable()
    faulthandler.dump_traceback_later(BOUND, exit=True)
    print("celery", celery.__version__)
    for name in sys.argv[1:]:
        began = time.monotonic()
        SCENARIOS[name]()
        print("passed", name)
        gc.collect()
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
