"""Lock servers that are unavailable: one line in the log when that begins and one when it ends.

A worker has many processes and thousands of tasks, and an outage hits all of them. What is known of it
is in memory that the processes of one worker share, so that one of them logs it for all.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

from celery import signals

QUIET = 10.0
"""Seconds from one line about a server to the next that says it is away: it may come and go."""

REMIND_AFTER = 60.0
"""Seconds after which a worker says again that a server is away."""

MOST = 64
"""Servers that are away at a time, of which lines are told apart."""

_SLOT = struct.Struct("=16sdd?Q")
"""The digest of a server's name, since when it is away, the time of the last line, whether that said
so, and how often tasks were requeued since."""

logger = logging.getLogger("celery_dflock")


class Outages:
    """The servers that did not answer the last time, for all processes of one worker."""

    def __init__(self) -> None:
        self.known = _memory()
        """Its first byte is 0 while no server is away: nearly always, so that it is quick to see."""
        self._mutex = threading.Lock()
        self._descriptor = -1
        """Of a file without a name that keeps the processes apart."""

    def prepare(self, **_: Any) -> None:
        """Prepare for processes that are forked later: a worker starts.

        It may itself be one of several that were forked where this was imported.
        """
        self.known = _memory()
        if self._descriptor < 0:
            with tempfile.TemporaryFile() as file:
                self._descriptor = os.dup(file.fileno())

    def after_fork(self) -> None:
        """Start as a child: what another thread of the parent was at does not go on here."""
        self._mutex = threading.Lock()

    def begun(self, server: str, reason: str) -> None:
        """A server is unavailable, and no task has met that yet."""
        with self._alone() as say:
            at, since, _, is_said, count = self._find(server)
            if not is_said:
                say("lock server %s is unavailable: %s", server, reason)
                now = time.monotonic()
                self._set(at, server, since or now, now, True, count)

    def requeued(self, server: str, reason: str) -> None:
        """A task was sent again because a server could not be asked."""
        with self._alone() as say:
            now = time.monotonic()
            at, since, said_at, is_said, count = self._find(server)
            since, count = since or now, count + 1
            if not is_said and (not said_at or now - said_at >= QUIET):
                text = "lock server %s is unavailable, its tasks are requeued until it answers: %s"
                say(text, server, reason)
                said_at, is_said = now, True
            elif is_said and now - said_at >= REMIND_AFTER:
                text = (
                    "lock server %s is still unavailable after %.0f s, tasks requeued since: %d: %s"
                )
                say(text, server, now - since, count, reason)
                said_at = now
            self._set(at, server, since, said_at, is_said, count)

    def refused(self, server: str, kind: str, reason: str) -> None:
        """A server that is there has said no to a task, which was sent again.

        It is no outage, for others have their locks. Each kind of error is said once a minute.
        """
        name = f"{server} {kind}"
        with self._alone() as say:
            now = time.monotonic()
            at, _, said_at, _, _ = self._find(name)
            if not said_at or now - said_at >= REMIND_AFTER:
                text = "lock server %s refuses a lock, its task is requeued until it is granted: %s"
                say(text, server, reason)
                self._set(at, name, 0.0, now, False, 0)

    def over(self, server: str) -> None:
        """A server has answered."""
        if not self._find(server)[1]:
            return
        with self._alone() as say:
            now = time.monotonic()
            at, since, said_at, is_said, count = self._find(server)
            if is_said:
                text = "lock server %s answers again after %.0f s, tasks requeued meanwhile: %d"
                say(text, server, now - since, count)
                said_at = now
            self._set(at, server, 0.0, said_at, False, 0)

    def _find(self, server: str) -> tuple[int, float, float, bool, int]:
        """Return what is known of a server, and where: in the first free slot if nothing is."""
        name, free = _digest(server), -1
        for at in range(1, len(self.known), _SLOT.size):
            found, since, said_at, is_said, count = _SLOT.unpack_from(self.known, at)
            if found == name:
                return at, since, said_at, is_said, count
            if free < 0 and not since:
                free = at
        # Beside so many others its lines are not held back, and that it is there again is not said.
        return free, 0.0, 0.0, False, 0

    def _set(
        self, at: int, server: str, since: float, said_at: float, is_said: bool, count: int
    ) -> None:
        if at < 0:
            return
        _SLOT.pack_into(self.known, at, _digest(server), since, said_at, is_said, count)
        slots = range(1, len(self.known), _SLOT.size)
        self.known[0] = any(_SLOT.unpack_from(self.known, slot)[1] for slot in slots)

    @contextmanager
    def _alone(self) -> Iterator[Callable[..., None]]:
        """Keep other threads out, and other processes: one that is killed keeps nobody out.

        Its lines are logged once others may come in: a log that blocks must not keep them from their
        tasks.
        """
        lines: list[tuple[Any, ...]] = []
        with self._mutex:
            if self._descriptor >= 0:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                yield lambda *line: lines.append(line)
            finally:
                if self._descriptor >= 0:
                    fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        for text, *about in lines:
            logger.warning(text, *about)


def _memory() -> mmap.mmap:
    """Return memory that this process shares with those that it forks."""
    return mmap.mmap(-1, 1 + MOST * _SLOT.size)


def _digest(server: str) -> bytes:
    return blake2b(server.encode(), digest_size=16).digest()


outages = Outages()
"""Those that the worker of this process knows of."""

os.register_at_fork(after_in_child=outages.after_fork)
signals.worker_init.connect(outages.prepare, dispatch_uid="celery_dflock.outages")
