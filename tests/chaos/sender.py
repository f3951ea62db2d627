"""Whoever sends the tasks, until SIGTERM: at random, some of each sort.

    python -m tests.chaos.sender --seed N --keys K --rate R ...

Where everything is it reads in its environment, as the workers do.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import threading
import uuid
from pathlib import Path

from tests.chaos import jobs
from tests.chaos.history import now
from tests.chaos.options import HISTORY, NEWEST, ONCE, key_names, of_users
from tests.chaos.processes import Finished
from tests.chaos.story import IN_DOUBT

BACKLOG = 30
"""Tasks under way at most."""

stopping = threading.Event()


class Doubts(logging.Handler):
    """Whether the plugin has said that it sends a task though it does not know all."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


class Sender:
    """Sends tasks and notes them.

    Args:
        options: the command's.
        doubts: what hears the log of the plugin.
    """

    def __init__(self, options: argparse.Namespace, doubts: Doubts) -> None:
        self._options = options
        self._doubts = doubts
        self._chance = random.Random(f"{options.seed}/tasks")
        self._keys = key_names(options.keys)
        self._finished = Finished(Path(os.environ[jobs.DIRECTORY]) / HISTORY)
        self._sent: set[str] = set()

    def run(self) -> None:
        """Send until the end; and then, when all is calm, one that is the newest of each key."""
        while not stopping.wait(self._chance.expovariate(self._options.rate)):
            if len(self._sent - self._finished.tasks()) < BACKLOG:
                self._chance.choice([self.plain] * 4 + [self.newests, self.once])()
        for key in self._keys:
            self.newest(key)

    def plain(self) -> None:
        """One of those that wait for each other."""
        key, task = self._chance.choice(self._keys), self._id()
        seconds = self._seconds(self._options.work)
        jobs.recorder().note("sent", task=task, key=key)
        self._sent.add(task)
        jobs.work.apply_async(kwargs={"key": key, "seconds": seconds}, task_id=task)

    def newests(self) -> None:
        """Some in a row."""
        key = self._chance.choice(self._keys)
        for _ in range(self._chance.choice((1, 2, 3))):
            self.newest(key)

    def newest(self, key: str) -> None:
        """One that stops those of its key that were sent before."""
        key, task = NEWEST + key, self._id()
        at, doubts = now(), self._doubts.count
        jobs.newest.apply_async(
            kwargs={"key": key, "seconds": self._seconds(self._options.aside)}, task_id=task
        )
        self._note(task, key, at, doubts)

    def once(self) -> None:
        """Two, the second of which is not sent while there is the first."""
        key = ONCE + self._chance.choice(self._keys)
        kwargs = {"key": key, "seconds": self._seconds(4 * self._options.aside)}
        for _ in range(2):
            at, doubts = now(), self._doubts.count
            task = str(jobs.once.apply_async(kwargs=kwargs).id)
            if task not in self._sent:
                self._note(task, key, at, doubts)

    def _note(self, task: str, key: str, at: int, doubts: int) -> None:
        detail = "" if doubts == self._doubts.count else IN_DOUBT
        self._sent.add(task)
        jobs.recorder().note("sent", at=at, until=now(), task=task, key=key, detail=detail)

    def _id(self) -> str:
        return str(uuid.UUID(int=self._chance.getrandbits(128), version=4))

    def _seconds(self, most: float) -> float:
        if self._chance.random() < self._options.long:
            return float(self._options.lease * (0.5 + self._chance.random()))
        return float(self._chance.random() * most)


def main() -> None:
    parser = of_users()
    parser.add_argument("--rate", type=float, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    doubts = Doubts()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("celery_dflock").addHandler(doubts)
    jobs.app.conf.result_backend = "disabled://"  # the record has them
    Sender(options, doubts).run()


if __name__ == "__main__":
    main()
