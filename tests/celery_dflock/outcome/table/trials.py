"""What can happen to a task, each as a function that makes it happen and sees what comes of it.

A lease lasts for `jobs.LONG`, and so does a body that somebody else is to end: what is free within
`PATIENCE` has waited for neither.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from examples.demo.stage import StageError
from tests.celery_dflock import jobs
from tests.celery_dflock.outcome.table.side import SOFT, Finding, Run, Side
from tests.celery_dflock.processes import PATIENCE, waiters

HEARD = 4.0
"""Seconds after which solo has not heard that it is to end, and will not before its task ends."""

LIMIT = 1
"""Seconds: the time limit where one is tried. Where none applies the task works for twice as long."""

LIMITED = {"soft_time_limit": {"prefork"}, "time_limit": {"prefork", "gevent"}}
"""The pools in which a time limit applies."""

DEAF = {"threads", "solo"}
"""The pools that cannot end a task."""

Trial: TypeAlias = Callable[[Side], Finding]
Ending: TypeAlias = Callable[[Side], None]

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
        return Finding(run.fate(), seconds)


# Somebody ends it.


def limited(option: str) -> Trial:
    def trial(side: Side) -> Finding:
        options: dict[str, Any] = {option: LIMIT}
        seconds = jobs.LONG if side.pool in LIMITED[option] else 2 * LIMIT
        with side.running(seconds=seconds, gated=False, **options) as run:
            seconds = run.freed(run.start["at"] + LIMIT)
            end = run.ended()
            if end is not None and end["error"] is None:
                return Finding(f"not applied, {run.fate()}")
            return Finding(run.fate(), seconds)

    return needs_worker(trial)


def terminated(side: Side) -> Finding:
    seconds = 2 if side.pool in DEAF else jobs.LONG
    with side.running(seconds=seconds, gated=False) as run:
        revoked_at = time.monotonic()
        side.revoke(run.id, terminate=True)
        seconds = run.freed(revoked_at)
        end = run.ended()
        if end is not None and end["error"] is None:
            return Finding(f"not applied, {run.fate()}")
        return Finding(run.fate(), seconds)


def revoked_waiting(terminate: bool) -> Trial:
    def trial(side: Side) -> Finding:
        with side.waiting() as run:
            revoked_at = time.monotonic()
            side.revoke(run.id, terminate)
            leaves = terminate and side.pool not in DEAF
            seconds = _left(run, revoked_at, 0, PATIENCE if leaves else 2.0)
        fate = run.fate()
        side.cluster.wait_free(run.key, side.server)
        if side.cluster.events(what="start", id=run.id):
            return Finding(f"not applied, {fate}")
        return Finding(fate, seconds)

    return needs_worker(trial)


def _left(run: Run, since: float, number: int, patience: float) -> float | None:
    """Seconds from then until so many are left who wait, if it comes to that."""
    while time.monotonic() < since + patience:
        if waiters(run.side.server, run.key) == number:
            return time.monotonic() - since
        time.sleep(0.001)
    return None


# The worker ends.


def by_signal(number: signal.Signals) -> Ending:
    return lambda side: os.kill(side.pid, number)


def finishing(ask: Ending, said: str) -> Trial:
    """It is asked to end while a task runs, which ends when that is known."""

    def trial(side: Side) -> Finding:
        with side.running() as run:
            ask(side)
            heard = _logs(side, said)
            run.gate.touch()
            seconds = run.freed(run.event("end")["at"])
            return Finding(
                _with_worker(run) if heard else f"heard late, {_with_worker(run)}", seconds
            )

    return needs_worker(trial)


def leaving(ask: Ending) -> Trial:
    """It is asked to end while a task waits for its lock."""

    def trial(side: Side) -> Finding:
        with side.waiting() as run:
            asked_at = time.monotonic()
            ask(side)
            seconds = _left(run, asked_at, 0, _hearing(side))
            in_time = seconds is not None and side.wait_worker_end()
        if seconds is None:
            in_time = side.wait_worker_end()
            fate = "heard late, "
        else:
            fate = "requeued, " if side.cluster.events(what="requeued", id=run.id) else ""
        side.ready()
        fate += run.fate()
        return Finding(fate if in_time else f"{fate}; worker hangs", seconds)

    return needs_worker(trial)


def _hearing(side: Side) -> float:
    """Seconds for a worker to hear that it is to end."""
    return HEARD if side.pool == "solo" else PATIENCE


def _logs(side: Side, text: str) -> bool:
    """Whether the worker logs that soon."""
    assert side.worker is not None
    try:
        side.worker.wait_log(text, _hearing(side))
    except StageError:
        return False
    return True


def softly(trial: Trial) -> Trial:
    def soft_trial(side: Side) -> Finding:
        with side.soft():
            return trial(side)

    return needs_worker(soft_trial)


def cold(*signals: int, after: float = 0.0) -> Trial:
    """The last of the signals ends it, so many seconds later."""

    def trial(side: Side) -> Finding:
        with side.running(seconds=jobs.LONG if side.pool == "prefork" else 4, gated=False) as run:
            assert side.worker is not None
            for number in signals[:-1]:
                os.kill(side.worker.pid, number)
                side.worker.wait_log("Warm shutdown")
            asked_at = time.monotonic()
            os.kill(side.worker.pid, signals[-1])
            seconds = run.freed(asked_at + after)
            end = run.ended()
            fate = _with_worker(run)
            if end is not None and end["error"] is None:
                return Finding(f"stays warm, {fate}")
            return Finding(fate, seconds)

    return needs_worker(trial)


def child_killed(side: Side) -> Finding:
    with side.running(seconds=jobs.LONG, gated=False) as run:
        assert side.worker is not None
        if run.start["pid"] == side.worker.pid:
            side.stop()
            return Finding("no child")
        killed_at = time.monotonic()
        os.kill(run.start["pid"], signal.SIGKILL)
        seconds = run.freed(killed_at)
        return Finding(run.fate(), seconds)


def worker_killed(side: Side) -> Finding:
    with side.running(seconds=jobs.LONG, gated=False) as run:
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


# A newer task comes, and the newest wins.


def superseded(**body: Any) -> Trial:
    def trial(side: Side) -> Finding:
        with side.running("latest", **body, gated=False) as run:
            newer = side.newer(run.key)
            asked_at = time.monotonic()
            assert newer.enqueue() == "queued"
            seconds = run.freed(asked_at)
            newer.release()
            fate, end = run.fate(), run.ended()
            if end is not None and end["error"] is None:
                return Finding(f"not interrupted, {fate}")
            return Finding(fate, seconds)

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
    "warm": Outcome(
        "warm shutdown (SIGTERM) while it runs",
        finishing(by_signal(signal.SIGTERM), "Warm shutdown"),
    ),
    "warm-waiting": Outcome("warm shutdown while it waits", leaving(by_signal(signal.SIGTERM))),
    "remote": Outcome(
        "remote shutdown (`app.control.shutdown()`) while it runs",
        finishing(Side.shut_down, "Got shutdown from remote"),
    ),
    "remote-waiting": Outcome("remote shutdown while it waits", leaving(Side.shut_down)),
    "cold": Outcome("cold shutdown (SIGQUIT)", cold(signal.SIGQUIT)),
    "cold-waiting": Outcome("cold shutdown while it waits", leaving(by_signal(signal.SIGQUIT))),
    "soft-ends": Outcome(
        "soft shutdown (SIGQUIT with `worker_soft_shutdown_timeout`), it ends in time",
        softly(finishing(by_signal(signal.SIGQUIT), "Initiating Soft Shutdown")),
    ),
    "soft-late": Outcome(
        "soft shutdown, it does not end in time", softly(cold(signal.SIGQUIT, after=SOFT))
    ),
    "soft-waiting": Outcome(
        "soft shutdown while it waits", softly(leaving(by_signal(signal.SIGQUIT)))
    ),
    "cold-int": Outcome("SIGINT twice", cold(signal.SIGINT, signal.SIGINT)),
    "cold-second": Outcome("SIGTERM twice", cold(signal.SIGTERM, signal.SIGTERM)),
    "child": Outcome("SIGKILL of the child", needs_worker(child_killed)),
    "worker": Outcome("SIGKILL of the worker", needs_worker(worker_killed)),
    "exit": Outcome("`os._exit` in the task", exits),
    "lost-waiting": Outcome("lock lost, in `time.sleep`", lost(seconds=4)),
    "lost-computing": Outcome("lock lost, in a loop that never waits", lost(then="spin")),
    "superseded-waiting": Outcome("superseded, in `time.sleep`", superseded(seconds=4)),
    "superseded-computing": Outcome(
        "superseded, in a loop that never waits", superseded(then="spin")
    ),
}
