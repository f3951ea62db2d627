"""What a lock costs a task in a real worker.

One worker (prefork, two processes) has the same task that does nothing seven times: without a lock,
as a `LockedTask`, as one with ``lock_unique``, with a redis-py `Lock` in its body, with the base
classes of celery-once and celery-singleton, and with nothing but the bytes of a lock in its body:
the least that two round trips can take. All share the worker, its warm connections and the
round, so that a disturbance of the machine meets all of them; a first turn of each is not counted.
Redis is broker, result backend and lock store of the others. It and our lock server are reached
over unix sockets.

- *Tasks per second*: both processes are kept busy until all tasks are in the queue; then from the
  beginning of the first to the end of the last, Celery's own part included, results ignored. What
  a library does when a task is *sent* is not in it. On few keys, drawn at random and the same for
  all, each task takes a few milliseconds, so that the two processes do meet at a lock.
- *One task*: ``apply_async().get()``, one way after the other, over and over; the median of a round.
- *Hand-over*: one task holds a key for a random time and another waits for it; from the end of the
  one's code to the beginning of the other's. redis-py is left at its default of a try each 0.1 s.

celery-once and celery-singleton lock at the time of sending and drop the second task of a key while
the first is queued or runs: nobody waits, so there is no hand-over, and no figure for few keys.
That is what ``lock_unique`` does, beside the lock of the run, which they have not. Neither of them
renews a lock or checks in the worker that it is still there: they do less for their time.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from celery import Task

from benchmarks.bench import Bench, turned
from benchmarks.loads import jobs
from benchmarks.task_stage import PATIENCE, TaskStage
from benchmarks.topic import Figures, Load, Topic

OURS = "LockedTask"
PLAIN = "no lock"
UNIQUE = "LockedTask with lock_unique"
REDIS = "redis-py Lock in the body"
ONCE = "celery-once"
SINGLETON = "celery-singleton"
BARE = "bare socket, same exchange"
WAYS = {
    OURS: jobs.locked,
    PLAIN: jobs.plain,
    UNIQUE: jobs.unique,
    REDIS: jobs.redis_lock,
    ONCE: jobs.once,
    SINGLETON: jobs.singleton,
    BARE: jobs.bare,
}
WAITING = (OURS, PLAIN, REDIS)
TASKS = 400
"""Sent for one throughput."""

FEW_KEYS = 4
WORK = 0.005
"""Seconds of work of a task on few keys."""


class Tasks:
    """The worker, and the tasks that are sent to it."""

    def __init__(self, directory: Path, stage: TaskStage) -> None:
        self._directory = directory
        self._stage = stage
        self._number = itertools.count()
        self._random = random.Random(5)

    def per_second(self, task: Task, number: int) -> float:
        """Tasks that the worker runs in a second, of `number` tasks with a key each."""
        return self._throughput(task, [(str(next(self._number)),) for _ in range(number)])

    def per_second_on_few_keys(self, task: Task, number: int) -> float:
        """The same over `FEW_KEYS` keys, with `WORK` to do."""
        keys = random.Random(number).choices(range(FEW_KEYS), k=number)
        return self._throughput(task, [(f"few:{key}", WORK) for key in keys])

    def _throughput(self, task: Task, calls: list[tuple[Any, ...]]) -> float:
        name = next(self._number)
        gate = self._directory / f"gate-{name}"
        for _ in range(2):
            jobs.occupy.apply_async((str(gate),), ignore_result=True)
        sent = [task.apply_async(args, ignore_result=True).id for args in calls]
        gate.touch()
        runs = self._stage.runs.of(sent)
        seconds = max(run["postrun"] for run in runs) - min(run["prerun"] for run in runs)
        return len(calls) / float(seconds)

    def one_by_one(self, number: int) -> dict[str, float]:
        """Return the microseconds from sending a task to its result, one task after the other.

        Which way comes first changes from turn to turn.
        """
        turns = [
            {name: self._whole(WAYS[name]) for name in turned(WAYS, turn)} for turn in range(number)
        ]
        return {name: statistics.median(turn[name] for turn in turns) * 1e6 for name in WAYS}

    def _whole(self, task: Task) -> float:
        started = time.perf_counter()
        task.apply_async((str(next(self._number)),)).get(timeout=PATIENCE)
        return time.perf_counter() - started

    def hand_over(self, task: Task, number: int) -> float:
        """Milliseconds from the end of a task to the beginning of the one that waits for it."""
        pauses = []
        for _ in range(number):
            key = f"shared:{next(self._number)}"
            seconds = self._random.uniform(0.1, 0.3)
            sent = [task.apply_async((key, seconds), ignore_result=True).id for _ in range(2)]
            first, second = sorted(self._stage.runs.of(sent), key=lambda run: float(run["begin"]))
            pauses.append(second["begin"] - first["end"])
        return float(statistics.median(pauses)) * 1e3


RATE = Topic(
    "tasks-per-second", "A worker's tasks per second, a key each", "/s", OURS, more_is_better=True
)
FEW = Topic(
    "tasks-few-keys",
    f"A worker's tasks of {WORK * 1e3:g} ms per second, {FEW_KEYS} keys",
    "/s",
    OURS,
    more_is_better=True,
)
WHOLE = Topic("task-whole", "One task, apply_async().get()", "us", OURS)
HAND_OVER = Topic("task-hand-over", "Hand-over of a key to a task that waits", "ms", OURS)


@contextlib.contextmanager
def load(bench: Bench) -> Iterator[Load]:
    with contextlib.ExitStack() as stack:
        here = TaskStage(bench, stack)
        jobs.configure(here.env)
        jobs.app.conf.dflock_servers = [here.env[jobs.SERVERS]]
        here.worker(2)
        tasks = Tasks(bench.directory, here)

        def measure(number: int, many: int = max(bench.scaled(TASKS), 20)) -> Figures:
            rates = {name: tasks.per_second(WAYS[name], many) for name in turned(WAYS, number)}
            few = {
                name: tasks.per_second_on_few_keys(WAYS[name], many // 5)
                for name in turned(WAITING, number)
            }
            whole = tasks.one_by_one(many // 6)
            hand_overs = {
                name: tasks.hand_over(WAYS[name], max(many // 50, 1))
                for name in turned((OURS, REDIS), number)
            }
            return {
                RATE.key: rates,
                FEW.key: few,
                WHOLE.key: whole,
                HAND_OVER.key: hand_overs,
            }

        measure(0, many=20)
        yield Load([RATE, FEW, WHOLE, HAND_OVER], measure)
        # It would unsubscribe at a Redis that is gone.
        jobs.app.backend.result_consumer.stop()
        jobs.app.close()
