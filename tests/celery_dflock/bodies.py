"""The body of the tasks of the tests, and the ways in which it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject

from celery_dflock import LockLostError, current_lock, dflock
from tests.celery_dflock.record import note

SHORT = 3
"""Seconds of a lease whose end, or whose renewals, a test waits for."""

ASIDE = "nobody-yet"
"""A queue that no worker serves: what is in it arrives when the test wants it to."""

SOON = 30
"""Seconds of a lease in which a hold is missed that an operator ends: by its renewal, at the half."""

LONG = 600
"""Seconds of what no test waits for: leases, timeouts, and bodies that do not end by themselves."""


def body(
    self: Task,
    key: str,
    then: str = "return",
    seconds: float = 0.0,
    gate: str | None = None,
    **_: Any,
) -> Any:
    """Work for `seconds`, and then until the file `gate` is there; end as `then` says."""
    lock = current_lock()
    request = self.request
    note(
        "start",
        self,
        key=key,
        fence=lock.fence if lock else None,
        waited=lock.waited if lock else None,
        acquired=getattr(request, "acquired_at", None),
        args=list(request.args),
        kwargs=request.kwargs,
        retries=request.retries,
        headers={k: v for k, v in (request.headers or {}).items() if k.startswith("x-")},
        priority=request.delivery_info.get("priority"),
        timelimit=request.timelimit,
        expires=str(request.expires) if request.expires else None,
    )
    error = None
    try:
        time.sleep(seconds)
        while gate is not None and not Path(gate).exists():
            time.sleep(0.005)
        return END[then](self)
    except BaseException as exc:
        error = type(exc).__name__
        raise
    finally:
        about = {"held": lock.held, "state": lock.state} if lock else {"held": None}
        note("end", self, key=key, error=error, **about, retries=request.retries)


def limited_body(self: Task, key: str, limit: Any, **kwargs: Any) -> Any:
    """Do as `body` does, at a key of which the arguments say how many may have it."""
    return body(self, key, **kwargs)


def weighed_body(self: Task, key: str, weight: Any, **kwargs: Any) -> Any:
    """Do as `body` does, for so many slots."""
    return body(self, key, **kwargs)


def body_of_call(
    self: Task, key: str, account: int, vendor: int, weight: Any = 1, **kwargs: Any
) -> Any:
    """Do as `body` does, for an account and a vendor, and so many slots of some lock."""
    return body(self, key, **kwargs)


def _raise(exc: BaseException) -> Any:
    raise exc


def _retry_then_clean_up(self: Task) -> Any:
    if self.request.retries:
        return "retried"
    try:
        raise self.retry(countdown=0)
    finally:
        # The retry is on its way to another process, and this run still holds the lock.
        time.sleep(0.3)


def _end_in_doubt(self: Task) -> str:
    lock = current_lock()
    while lock is not None and lock.state == "held":
        time.sleep(0.005)
    note("doubt", self, state=lock.state if lock else None)
    return str(self.request.id)


def _retry_in_doubt(self: Task) -> Any:
    if self.request.retries:
        return self.request.id
    _end_in_doubt(self)
    raise self.retry(countdown=1)


def _retry_if_lost(self: Task) -> Any:
    if not self.request.retries:
        try:
            time.sleep(LONG)
        except LockLostError as exc:
            raise self.retry(exc=exc, countdown=0) from exc
    return self.request.id


def _fork(self: Task) -> None:
    child = os.fork()
    if child:
        note("forked", self, child=child)
    time.sleep(LONG)
    os._exit(0)


def _spin(_: Task) -> None:
    """Three seconds of Python code that never waits for anything."""
    until = time.monotonic() + 3
    while time.monotonic() < until:
        pass


def _be_busy(self: Task) -> str:
    """Compute for longer than a short lease, and let others do so every now and then."""
    until = time.monotonic() + 1.2 * SHORT
    while time.monotonic() < until:
        pause = time.monotonic() + 0.02
        while time.monotonic() < pause:
            pass
        time.sleep(0.001)  # gevent runs what else is ready at 0, and looks at no timer
    return str(self.request.id)


def _take_more(self: Task) -> str:
    """Take locks in the body: a free one and another, each by itself and for a task within."""
    key = self.request.kwargs["key"]
    for inner in (f"{key}:free", f"{key}:held"):
        with dflock(inner, LONG, app=self.app):
            pass
        self.app.tasks["patient"].apply(kwargs={"key": inner}, throw=True)
    return str(self.request.id)


def _send_again(self: Task) -> str:
    again = self.apply_async((), {"key": self.request.kwargs["key"]}, countdown=0)
    return str(again.id)


END: dict[str, Callable[[Task], Any]] = {
    "return": lambda self: self.request.id,
    "raise": lambda _: _raise(ValueError("as asked")),
    "raise once": lambda self: self.request.retries or _raise(ValueError("as asked")),
    "retry once": lambda self: self.request.retries or _raise(self.retry(countdown=0)),
    "retry slowly": _retry_then_clean_up,
    "retry if lost": _retry_if_lost,
    "retry later": lambda self: self.request.retries or _raise(self.retry(countdown=0.5)),
    "retry with headers": lambda self: (
        self.request.retries or _raise(self.retry(countdown=0.5, headers={"x-own": "1"}))
    ),
    "retry aside": lambda self: (
        self.request.retries or _raise(self.retry(countdown=0, queue=ASIDE))
    ),
    "end in doubt": _end_in_doubt,
    "retry in doubt": _retry_in_doubt,
    "send again": _send_again,
    "take more": _take_more,
    "fork": _fork,
    "spin": _spin,
    "busy": _be_busy,
    "exit": lambda _: os._exit(1),
    "ignore": lambda _: _raise(Ignore()),
    "reject": lambda _: _raise(Reject("as asked", requeue=False)),
    "reject to the queue": lambda self: (
        self.request.delivery_info["redelivered"] or _raise(Reject("as asked", requeue=True))
    ),
}
