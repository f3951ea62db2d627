"""What happens to the lock and to the task, however it ends, in every pool.

    python -m tests.celery_dflock.outcomes                      # all of it, into docs/outcomes.md
    python -m tests.celery_dflock.outcomes --show warm gevent   # some cells, to the terminal

Every cell is a run of a real worker (eager: of this process): a task holds its lock, somebody else
waits for it already, then it happens, and the time from there to the grant is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
from celery import states
from celery.exceptions import TimeoutError as ResultTimeoutError
from celery.utils.nodenames import gethostname

from examples.demo.stage import ROOT, LockServer, Redis, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.cluster import PATIENCE, Cluster, Event, Waiter, waiters

PAGE = ROOT / "docs" / "outcomes.md"
MARKED = re.compile(r"(<!-- begin: .*? -->\n).*?(<!-- end -->)", re.DOTALL)

POOLS = {"prefork": 2, "threads": 2, "solo": 1, "gevent": 20, "eventlet": 20, "eager": 1}
"""The pools, with the concurrency that they are run with."""

SETTLING = 1.0
"""Seconds after the end of a task within which its state must be final, or never will be."""

CHILD_SETTLING = 15.0
"""The same for a child that has died: the pool waits for its result for up to ten seconds."""

LIMIT = 1
"""Seconds: the time limit where one is tried. The task works for twice as long."""

ENDED = 8.0
"""Seconds within which a worker has to end."""

_numbers = itertools.count()


class Finding(NamedTuple):
    """One cell: what became of the task, and how long after it happened the lock was free."""

    fate: str
    seconds: float | None = None

    def __str__(self) -> str:
        if self.seconds is None:
            return self.fate
        milliseconds = max(0.0, self.seconds) * 1000
        return (
            f"{milliseconds:.0f} ms: {self.fate}" if milliseconds >= 1 else f"< 1 ms: {self.fate}"
        )


class Side:
    """One pool: its worker, and what is sent to it."""

    def __init__(self, pool: str, cluster: Cluster, server: LockServer) -> None:
        self.pool = pool
        self.cluster = cluster
        self.server = server
        self.name = f"pool-{pool}"
        self.worker: Worker | None = None
        if pool != "eager":
            self.worker = cluster.worker(
                self.name, pool=pool, concurrency=POOLS[pool], servers=server.address
            )

    def start(self) -> None:
        """Start the worker unless it runs."""
        if self.worker is not None and not self.worker.running:
            self.worker.start()

    def ready(self) -> None:
        """Wait for the worker."""
        self.start()
        if self.worker is not None:
            self.worker.wait_ready()

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.kill()

    def wait_worker_end(self) -> bool:
        """Whether the worker ends in time; it is killed if it does not."""
        assert self.worker is not None
        deadline = time.monotonic() + ENDED
        while self.worker.running and time.monotonic() < deadline:
            time.sleep(0.01)
        in_time = not self.worker.running
        self.worker.kill()
        return in_time

    @contextlib.contextmanager
    def running(self, task: str = "patient", **options: Any) -> Iterator[Run]:
        """A task that runs with its lock, and somebody who waits for it."""
        self.ready()
        with contextlib.ExitStack() as end:
            run = Run(self, task, options)
            end.callback(run.gate.touch)
            run.start = run.event("start")
            run.other = end.enter_context(Waiter(self.cluster.lock(run.key, self.server)))
            self.cluster.wait_waiters(run.key, 1, self.server)
            yield run

    @contextlib.contextmanager
    def waiting(self) -> Iterator[Run]:
        """A task that waits for its lock."""
        self.ready()
        key = f"outcome:{self.pool}:{next(_numbers)}"
        with self.cluster.lock(key, self.server):
            run = Run(self, "patient", {"gated": False}, key)
            self.cluster.wait_waiters(key, 1, self.server)
            yield run


class Run:
    """One task that has been sent."""

    start: Event
    other: Waiter

    def __init__(
        self, side: Side, task: str, options: dict[str, Any], key: str | None = None
    ) -> None:
        self.side = side
        self.key = key or f"outcome:{side.pool}:{next(_numbers)}"
        self.gate = side.cluster.directory / f"gate-{self.key.replace(':', '-')}"
        self._state: str | None = None
        self._result: Any = None
        kwargs = {"key": self.key}
        if options.pop("gated", True):
            kwargs["gate"] = str(self.gate)
        kwargs |= {name: options.pop(name) for name in ("then", "seconds") if name in options}
        if side.pool == "eager":
            self.id = f"eager-{self.key}"
            self._thread = threading.Thread(target=self._apply, args=(task, kwargs), daemon=True)
            self._thread.start()
        else:
            self.sent = jobs.app.tasks[task].apply_async((), kwargs, queue=side.name, **options)
            self.id = self.sent.id

    def _apply(self, task: str, kwargs: dict[str, Any]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DFLOCK_SERVERS", self.side.server.address)
            outcome = jobs.app.tasks[task].apply((), kwargs, task_id=self.id)
        self._state, self._result = outcome.state, outcome.result

    def revoke(self, terminate: bool) -> None:
        """As its own worker sees it; any other would note it as revoked without a look at it."""
        where = [f"{self.side.name}@{gethostname()}"]
        jobs.app.control.revoke(self.id, terminate=terminate, destination=where)

    def event(self, what: str, **wanted: Any) -> Event:
        """The first such event of this task."""

        def probe() -> Event | None:
            events = self.side.cluster.events(**{"what": what, "id": self.id, **wanted})
            return events[0] if events else None

        return self.side.cluster.wait(probe, f"event {what!r} of task {self.id}")

    def ended(self) -> Event | None:
        """How the body ended, if it could say so."""
        ends = self.side.cluster.events(what="end", id=self.id)
        return ends[0] if ends else None

    def fate(self, settling: float = SETTLING) -> str:
        """What the sender of the task gets to know in the end."""
        if self.side.pool == "eager":
            self._thread.join(PATIENCE)
            state, result = str(self._state), self._result
        else:
            with contextlib.suppress(ResultTimeoutError):
                self.sent.get(timeout=settling, propagate=False)
            state, result = self.sent.state, self.sent.result
        is_named = state == states.FAILURE and isinstance(result, BaseException)
        return f"{state} ({type(result).__name__})" if is_named else state

    def freed(self, since: float) -> float:
        """Seconds from then to the grant to who waits; then that lock is given back."""
        seconds = self.other.wait_granted() - since
        self.other.lock.release()
        return seconds


Trial: TypeAlias = Callable[[Side], Finding]

NO_WORKER = Finding("—")


def needs_worker(trial: Trial) -> Trial:
    return lambda side: NO_WORKER if side.pool == "eager" else trial(side)


# The task ends by itself.


def ends(then: str, task: str = "patient") -> Trial:
    def trial(side: Side) -> Finding:
        with side.running(task, then=then) as run:
            run.gate.touch()
            seconds = run.freed(run.event("end")["at"])
            return Finding(run.fate(), seconds)

    return trial


def exits(side: Side) -> Finding:
    if side.pool == "eager":
        return Finding("ends the caller")
    with side.running(then="exit") as run:
        run.gate.touch()
        seconds = run.freed(time.monotonic())
        return Finding(run.fate(CHILD_SETTLING if side.pool == "prefork" else SETTLING), seconds)


# Somebody ends it.


def limited(option: str) -> Trial:
    def trial(side: Side) -> Finding:
        with side.running(seconds=2 * LIMIT, gated=False, **{option: LIMIT}) as run:
            seconds = run.freed(run.start["at"] + LIMIT)
            end = run.ended()
            if end is not None and end["error"] is None:
                return Finding(f"not applied, {run.fate()}")
            return Finding(run.fate(), seconds)

    return needs_worker(trial)


def terminated(side: Side) -> Finding:
    with side.running(seconds=2, gated=False) as run:
        revoked_at = time.monotonic()
        run.revoke(terminate=True)
        seconds = run.freed(revoked_at)
        end = run.ended()
        if end is not None and end["error"] is None:
            return Finding(f"not applied, {run.fate()}")
        return Finding(run.fate(), seconds)


def revoked_waiting(terminate: bool) -> Trial:
    def trial(side: Side) -> Finding:
        with side.waiting() as run:
            revoked_at = time.monotonic()
            run.revoke(terminate)
            seconds = _left(run, revoked_at, 0, patience=2.0)
        fate = run.fate()
        side.cluster.wait_free(run.key, side.server)
        if side.cluster.events(what="start", id=run.id):
            return Finding(f"not applied, {fate}")
        return Finding(fate, seconds)

    return needs_worker(trial)


def _left(run: Run, since: float, number: int, patience: float = PATIENCE) -> float | None:
    """Seconds from then until so many are left who wait, if it comes to that."""
    while time.monotonic() < since + patience:
        if waiters(run.side.server, run.key) == number:
            return time.monotonic() - since
        time.sleep(0.001)
    return None


# The worker ends.


def warm(side: Side) -> Finding:
    with side.running() as run:
        assert side.worker is not None
        os.kill(side.worker.pid, signal.SIGTERM)
        side.worker.wait_log("Warm shutdown")
        run.gate.touch()
        seconds = run.freed(run.event("end")["at"])
        return Finding(_with_worker(run), seconds)


def warm_waiting(side: Side) -> Finding:
    with side.waiting() as run:
        assert side.worker is not None
        asked_at = time.monotonic()
        os.kill(side.worker.pid, signal.SIGTERM)
        seconds = _left(run, asked_at, 0)
        in_time = side.wait_worker_end()
        side.start()
    fate = "requeued, " if side.cluster.events(what="requeued", id=run.id) else ""
    side.ready()
    run.sent.get(timeout=PATIENCE, propagate=False)
    return Finding(f"{fate}{run.fate()}" + ("" if in_time else "; worker hangs"), seconds)


def cold(*signals: int) -> Trial:
    def trial(side: Side) -> Finding:
        with side.running(seconds=4, gated=False) as run:
            assert side.worker is not None
            for number in signals[:-1]:
                os.kill(side.worker.pid, number)
                side.worker.wait_log("Warm shutdown")
            asked_at = time.monotonic()
            os.kill(side.worker.pid, signals[-1])
            seconds = run.freed(asked_at)
            end = run.ended()
            fate = _with_worker(run)
            if end is not None and end["error"] is None:
                return Finding(f"stays warm, {fate}")
            return Finding(fate, seconds)

    return needs_worker(trial)


def child_killed(side: Side) -> Finding:
    with side.running(seconds=30, gated=False) as run:
        assert side.worker is not None
        if run.start["pid"] == side.worker.pid:
            side.stop()
            return Finding("no child")
        killed_at = time.monotonic()
        os.kill(run.start["pid"], signal.SIGKILL)
        seconds = run.freed(killed_at)
        return Finding(run.fate(CHILD_SETTLING), seconds)


def worker_killed(side: Side) -> Finding:
    with side.running(seconds=30, gated=False) as run:
        assert side.worker is not None
        killed_at = time.monotonic()
        os.kill(side.worker.pid, signal.SIGKILL)
        seconds = run.freed(killed_at)
        return Finding(_with_worker(run), seconds)


def _with_worker(run: Run) -> str:
    """The fate of a task whose worker ends."""
    fate = run.fate()
    return fate if run.side.wait_worker_end() else f"{fate}; worker hangs"


# The server forgets the lock.


def lost(**body: Any) -> Trial:
    def trial(side: Side) -> Finding:
        side.ready()
        run = Run(side, "patient", {**body, "gated": False})
        run.event("start")
        side.server.kill()
        side.server.start()
        end = run.event("end")
        fate = run.fate()
        if end["error"] is None:
            return Finding(f"not interrupted, {fate}")
        # Noted by the renewal thread, which does not know whose request it is.
        return Finding(fate, end["at"] - run.event("lost", id=None, key=run.key)["at"])

    return trial


class Outcome(NamedTuple):
    name: str
    trial: Trial


OUTCOMES: dict[str, Outcome] = {
    "success": Outcome("success", ends("return")),
    "exception": Outcome("exception", ends("raise")),
    "retry": Outcome("`self.retry`", ends("retry once")),
    "autoretry": Outcome("`autoretry_for`", ends("raise once", "retried")),
    "ignore": Outcome("`Ignore`", ends("ignore")),
    "reject": Outcome("`Reject(requeue=False)`", ends("reject")),
    "soft": Outcome("soft time limit", limited("soft_time_limit")),
    "hard": Outcome("hard time limit", limited("time_limit")),
    "revoke-waiting": Outcome("revoke while it waits", revoked_waiting(terminate=False)),
    "terminate-waiting": Outcome(
        "revoke with `terminate` while it waits", revoked_waiting(terminate=True)
    ),
    "terminate": Outcome("revoke with `terminate` while it runs", needs_worker(terminated)),
    "warm": Outcome("warm shutdown (SIGTERM) while it runs", needs_worker(warm)),
    "warm-waiting": Outcome("warm shutdown while it waits", needs_worker(warm_waiting)),
    "cold": Outcome("cold shutdown (SIGQUIT)", cold(signal.SIGQUIT)),
    "cold-int": Outcome("SIGINT twice", cold(signal.SIGINT, signal.SIGINT)),
    "cold-second": Outcome("SIGTERM twice", cold(signal.SIGTERM, signal.SIGTERM)),
    "child": Outcome("SIGKILL of the child", needs_worker(child_killed)),
    "worker": Outcome("SIGKILL of the worker", needs_worker(worker_killed)),
    "exit": Outcome("`os._exit` in the task", exits),
    "lost-waiting": Outcome("lock lost, in `time.sleep`", lost(seconds=4)),
    "lost-computing": Outcome("lock lost, in a loop that never waits", lost(then="spin")),
}


@contextlib.contextmanager
def stage(pools: list[str]) -> Iterator[dict[str, Side]]:
    """Everything that a run needs, for the command line."""
    with contextlib.ExitStack() as end:
        directory = Path(end.enter_context(tempfile.TemporaryDirectory(prefix="outcomes-")))
        redis = end.enter_context(Redis(directory))
        server = end.enter_context(LockServer(directory))
        patch = end.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(jobs.BROKER, redis.url)
        patch.setenv(jobs.RECORD, str(directory / "record.jsonl"))
        jobs.configure({jobs.BROKER: redis.url})
        cluster = Cluster(directory, server)
        sides = {pool: Side(pool, cluster, server) for pool in pools}
        for side in sides.values():
            end.callback(side.stop)
            side.start()
        yield sides
        # Results that never came would unsubscribe at a Redis that is gone.
        jobs.app.backend.result_consumer.stop()
        jobs.app.backend.result_consumer.subscribed_to.clear()
        jobs.app.close()


def table(found: dict[str, dict[str, Finding]], pools: list[str]) -> str:
    rows = ["| what happens | " + " | ".join(pools) + " |", "|---" * (len(pools) + 1) + "|"]
    rows += [
        f"| {OUTCOMES[name].name} | " + " | ".join(str(cells[pool]) for pool in pools) + " |"
        for name, cells in found.items()
    ]
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("only", nargs="*", help="outcomes and pools; all by default")
    parser.add_argument("--show", action="store_true", help="leave the page as it is")
    parser.add_argument("--runs", type=int, default=1, help="of each cell; the slowest counts")
    options = parser.parse_args()
    pools = [pool for pool in POOLS if pool in options.only] or list(POOLS)
    names = [name for name in OUTCOMES if name in options.only] or list(OUTCOMES)
    found: dict[str, dict[str, Finding]] = {}
    with stage(pools) as sides:
        for name in names:
            found[name] = {}
            for pool in pools:
                runs = [OUTCOMES[name].trial(sides[pool]) for _ in range(options.runs)]
                found[name][pool] = max(runs, key=lambda finding: finding.seconds or 0.0)
                print(f"{name:18} {pool:9} {found[name][pool]}", file=sys.stderr, flush=True)
    if options.show or options.only:
        print(table(found, pools))
    else:
        text = MARKED.sub(lambda page: page[1] + table(found, pools) + page[2], PAGE.read_text())
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
