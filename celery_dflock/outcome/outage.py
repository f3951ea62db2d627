"""Lock servers that are unavailable: each process logs a line when that begins and one when it ends."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass

from dflockd import clock

QUIET = 10.0
"""Seconds from one line about a server to the next that says it is away: it may come and go."""

REMIND_AFTER = 60.0
"""Seconds after which a process says again that a server is away."""

logger = logging.getLogger("celery_dflock")


@dataclass(slots=True)
class _Outage:
    since: float
    count: int = 0  # how often a task was requeued since
    is_said: bool = False


class Outages:
    """The servers that did not answer this process the last time.

    Lines are logged once other threads may come in: a log that blocks must not keep them from their
    tasks.

    Attributes:
        known: by the name of the server; nearly always empty.
    """

    def __init__(self) -> None:
        self.known: dict[str, _Outage] = {}
        self._said_at: dict[str, float] = {}
        self._mutex = threading.Lock()

    def away(self, server: str, reason: str, tasks: int = 1) -> None:
        """A server could not be asked, and so many tasks were sent again because of that."""
        now = clock.now()
        with self._mutex:
            outage = self.known.setdefault(server, _Outage(now))
            outage.count += tasks
            was_said, seconds, count = outage.is_said, now - outage.since, outage.count
            if not self._is_due(server, REMIND_AFTER if was_said else QUIET):
                return
            outage.is_said = True
        if was_said:
            text = "lock server %s is still unavailable after %.0f s, tasks requeued since: %d: %s"
            logger.warning(text, server, seconds, count, reason)
        else:
            requeued = ", its tasks are requeued until it answers" if tasks else ""
            logger.warning("lock server %s is unavailable%s: %s", server, requeued, reason)

    def refused(self, server: str, kind: str, reason: str) -> None:
        """A server that is there has said no to a task, which was sent again.

        It is no outage, for others have their locks. Each kind of error is said once a minute.
        """
        with self._mutex:
            if not self._is_due(f"{server} {kind}", REMIND_AFTER):
                return
        text = "lock server %s refuses a lock, its task is requeued until it is granted: %s"
        logger.warning(text, server, reason)

    def over(self, server: str) -> None:
        """A server has answered."""
        now = clock.now()
        with self._mutex:
            outage = self.known.pop(server, None)
            if outage is None or not outage.is_said:
                return
            self._said_at[server] = now
        text = "lock server %s answers again after %.0f s, tasks requeued meanwhile: %d"
        logger.warning(text, server, now - outage.since, outage.count)

    def after_fork(self) -> None:
        """Start as a child: what the parent knows is for the parent to say."""
        self.__init__()  # type: ignore[misc]

    def _is_due(self, name: str, pause: float) -> bool:
        """Whether so many seconds have gone since the last line; then this is one."""
        now, said_at = clock.now(), self._said_at.get(name)
        if said_at is not None and now - said_at < pause:
            return False
        self._said_at[name] = now
        return True


outages = Outages()
"""Those that this process knows of."""

os.register_at_fork(after_in_child=outages.after_fork)
