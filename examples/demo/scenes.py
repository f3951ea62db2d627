"""What happens on the stage: bursts of contending deposits, and the death of a lock holder."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from celery import Task

from examples.demo import record, tasks
from examples.demo.ledger import Ledger
from examples.demo.stage import WAIT, LockServer, Redis, StageError, Worker, wait_until

ACCOUNTS = range(1, 5)
DEPOSITS = 40
WORK_SECONDS = (0.10, 0.20)
# Scene C: a holder that would work for long, killed once the others have waited for a while.
HOLD_SECONDS = 10.0
KILL_AFTER_SECONDS = 1.0
NEXT_SECONDS = (0.7, 0.5)

T = TypeVar("T")


@dataclass(frozen=True)
class Burst:
    """Deposits that were sent at once: how many, the runs of their bodies, the sum of balances."""

    sent: int
    runs: list[record.Span]
    balance: int


@dataclass(frozen=True)
class Kill:
    """A lock holder killed at `at` (monotonic ns), and those who waited for its lock."""

    pid: int
    at: int
    runs: list[record.Span]

    @property
    def next_after_ms(self) -> float:
        """From the kill to the start of the next body."""
        return (min(run.start for run in self.runs if not run.killed) - self.at) / 1e6


class Stage:
    """A broker, a lock server and two workers that are up."""

    def __init__(
        self, directory: Path, redis: Redis, locks: LockServer, workers: Sequence[Worker]
    ) -> None:
        self.locks = locks
        self.workers = workers
        self._directory = directory
        self._processes = (redis, *workers, locks)

    def burst(self, task: Task, progress: Callable[[int], object]) -> Burst:
        """Send all deposits at once, tell `progress` how many are done, return when all are."""
        sent = [send(task, account, seconds) for account, seconds in deposits()]

        def finished(runs: list[record.Span]) -> bool:
            done = ended(runs)
            progress(done)
            return done >= len(sent)

        runs = self._wait_runs(sent, finished)
        ledger = Ledger(self._directory, book=task.name)
        return Burst(len(sent), runs, sum(map(ledger.balance, ACCOUNTS)))

    def kill_holder(self, task: Task) -> Kill:
        """SIGKILL the process that holds a lock while others wait for it."""
        account = ACCOUNTS[0]
        holder = send(task, account, HOLD_SECONDS)
        pid = self._wait_runs([holder], bool)[0].pid
        waiting = [send(task, account, seconds) for seconds in NEXT_SECONDS]
        self._wait(lambda: self._asked(waiting) or None, "for tasks that ask for the lock")
        self._let_them_wait(waiting)
        at = time.monotonic_ns()
        os.kill(pid, signal.SIGKILL)
        self._wait_runs(waiting, lambda runs: ended(runs) == len(waiting))
        return Kill(pid, at, record.with_kill(self._runs([holder, *waiting]), pid, at))

    def _asked(self, sent: Sequence[str]) -> bool:
        asked = {event.task for event in self._events() if event.what == "asked"}
        return asked.issuperset(sent)

    def _let_them_wait(self, waiting: Sequence[str]) -> None:
        """Nothing may happen for a while; if a body starts after all, the checks will show it."""
        until = time.monotonic() + KILL_AFTER_SECONDS
        self._wait(
            lambda: self._runs(waiting) or time.monotonic() > until or None, "while nothing happens"
        )

    def _wait_runs(
        self, sent: Sequence[str], enough: Callable[[list[record.Span]], bool]
    ) -> list[record.Span]:
        def probe() -> list[record.Span] | None:
            runs = self._runs(sent)
            return runs if enough(runs) else None

        return self._wait(probe, f"for {len(sent)} tasks")

    def _wait(self, probe: Callable[[], T | None], what: str) -> T:
        def probe_alive() -> T | None:
            for process in self._processes:
                if not process.running:
                    raise StageError(process.with_log(f"{process.name} has ended"))
            return probe()

        return wait_until(probe_alive, WAIT, lambda: self._stuck(what))

    def _stuck(self, what: str) -> str:
        logs = (process.with_log(process.name) for process in self._processes)
        return "\n\n".join([f"Waited for {WAIT:g} s {what}.", *logs])

    def _runs(self, sent: Sequence[str]) -> list[record.Span]:
        return record.spans(self._events(), sent)

    def _events(self) -> list[record.Event]:
        return record.read(record_file(self._directory))


def record_file(directory: Path) -> Path:
    return directory / "record.jsonl"


@contextlib.contextmanager
def set_stage(directory: Path) -> Iterator[Stage]:
    """Start everything, configure this process to send tasks, and stop everything at the end."""
    with contextlib.ExitStack() as running:
        redis = running.enter_context(Redis(directory))
        locks = running.enter_context(LockServer(directory))
        env = {
            tasks.BROKER: redis.url,
            tasks.LOCK_SERVERS: locks.address,
            tasks.RECORD: str(record_file(directory)),
        }
        workers = [
            running.enter_context(Worker(directory, name=name, env=env)) for name in ("one", "two")
        ]
        for worker in workers:
            worker.wait_ready()
        tasks.configure(env)
        running.callback(tasks.app.close)
        yield Stage(directory, redis, locks, workers)


def deposits() -> list[tuple[int, float]]:
    """Account and seconds of work for each deposit: mixed up, but the same at every call."""
    dice = random.Random(40)
    accounts = [*ACCOUNTS] * (DEPOSITS // len(ACCOUNTS))
    dice.shuffle(accounts)
    return [(account, dice.uniform(*WORK_SECONDS)) for account in accounts]


def send(task: Task, account: int, seconds: float) -> str:
    """Send the task; its id."""
    return str(task.apply_async(kwargs={"account": account, "seconds": seconds}).id)


def ended(runs: Sequence[record.Span]) -> int:
    """How many of the bodies reached their end."""
    return sum(run.end is not None for run in runs)
