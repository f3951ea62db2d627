"""Looks up names, which takes threads of their own: nobody can do it without waiting."""

from __future__ import annotations

import _thread
import socket
from typing import Any

from dflockd import clock
from dflockd.client.flow import Signal
from dflockd.client.greenlets import current_hub

SHARED_FOR = 1.0
"""Seconds after which nobody else waits for a look-up that has not answered yet."""

under_way: dict[tuple[Any, str, int], LookUp] = {}
"""Those of each hub of greenlets: what happens in one wakes nobody in another."""


class LookUp(Signal):
    """A name that is being looked up; fired once it has an outcome."""

    __slots__ = ("began", "outcome")

    def __init__(self, began: float) -> None:
        super().__init__()
        self.began = began
        self.outcome: Any = None
        """What `getaddrinfo` has returned, or the error that it has raised."""


def look_up(host: str, port: int) -> LookUp:
    """Have a name looked up in another thread.

    Callers that ask for the same host and port at the same time share one look-up. A look-up that does
    not answer holds up nobody who asks for another host, and those who ask for the same not for
    long. From any thread, and without a lock.
    """
    where, now = (current_hub(), host, port), clock.now()
    latest = under_way.get(where)
    if latest is None or latest.fired or not latest.began <= now < latest.began + SHARED_FOR:
        latest = LookUp(now)
        try:
            _thread.start_new_thread(_run, (where, latest))
        except RuntimeError as exc:  # there are no threads at the moment
            latest.outcome = OSError(str(exc))
            latest.fire()
        # Not before: if this is interrupted, nobody waits for a thread that never began.
        under_way[where] = latest
    return latest


def _run(where: tuple[Any, str, int], latest: LookUp) -> None:
    try:
        latest.outcome = socket.getaddrinfo(*where[1:], type=socket.SOCK_STREAM)
    except Exception as exc:
        latest.outcome = exc
    latest.fire()
    if under_way.get(where) is latest:
        under_way.pop(where, None)
