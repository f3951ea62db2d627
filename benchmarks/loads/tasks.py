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
- *What a lock adds* to such a task: the time for sending it and the time that the worker's process
  spends on it, less the same for the task without a lock a moment before or after; the median of
  these differences. What broker and result backend take is left out: it differs by noise alone.
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
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from celery import Task

from benchmarks import servers
from benchmarks.bench import Bench, turned
from benchmarks.loads import jobs
from benchmarks.topic import Figures, Goal, Load, Topic
from examples.demo import stage

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
TASKS = 600
"""Sent for one throughput."""

FEW_KEYS = 4
WORK = 0.005
"""Seconds of work of a task on few keys."""

PATIENCE = 120.0

Run = dict[str, Any]


class Sample(NamedTuple):
    """Seconds of one task."""

    whole: float
    """From sending it to its result."""
    cost: float
    """Of the sender, and of the process that runs it."""


class Call(NamedTuple):
    """What its sender knows of a task: seconds."""

    id: str
    sending: float
    whole: float

    def sample(self, run: Run) -> Sample:
        return Sample(self.whole, self.sending + float(run["postrun"] - run["prerun"]))


class Tasks:
    """The worker, and the tasks that are sent to it."""

    def __init__(self, directory: Path, record: Path) -> None:
        self._directory = directory
        self._record = record
        self._read = 0
        self._runs: dict[str, Run] = {}
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
        runs = self._runs_of(sent)
        seconds = max(run["postrun"] for run in runs) - min(run["prerun"] for run in runs)
        return len(calls) / float(seconds)

    def one_by_one(self, number: int) -> tuple[dict[str, float], dict[str, float]]:
        """Microseconds from sending a task to its result, and what each costs beside `PLAIN`."""
        turns = self._turns(number)
        whole = {name: statistics.median(turn[name].whole for turn in turns) * 1e6 for name in WAYS}
        added = {
            name: statistics.median(turn[name].cost - turn[PLAIN].cost for turn in turns) * 1e6
            for name in WAYS
            if name != PLAIN
        }
        return whole, added

    def _turns(self, number: int) -> list[dict[str, Sample]]:
        """Send one task after the other; who comes first changes from turn to turn."""
        called = [
            {name: self._call(WAYS[name]) for name in turned(WAYS, turn)} for turn in range(number)
        ]
        runs = iter(self._runs_of([call.id for calls in called for call in calls.values()]))
        return [{name: call.sample(next(runs)) for name, call in calls.items()} for calls in called]

    def _call(self, task: Task) -> Call:
        started = time.perf_counter()
        result = task.apply_async((str(next(self._number)),))
        sent = time.perf_counter()
        result.get(timeout=PATIENCE)
        return Call(result.id, sent - started, time.perf_counter() - started)

    def hand_over(self, task: Task, number: int) -> float:
        """Milliseconds from the end of a task to the beginning of the one that waits for it."""
        pauses = []
        for _ in range(number):
            key = f"shared:{next(self._number)}"
            seconds = self._random.uniform(0.1, 0.3)
            sent = [task.apply_async((key, seconds), ignore_result=True).id for _ in range(2)]
            first, second = sorted(self._runs_of(sent), key=lambda run: float(run["begin"]))
            pauses.append(second["begin"] - first["end"])
        return float(statistics.median(pauses)) * 1e3

    def _runs_of(self, sent: list[str]) -> list[Run]:
        """Wait until these tasks have run."""

        def probe() -> list[Run] | None:
            self._read_on()
            return [self._runs.pop(each) for each in sent] if self._runs.keys() >= {*sent} else None

        return stage.wait_until(probe, PATIENCE, lambda: f"{len(sent)} tasks did not all run")

    def _read_on(self) -> None:
        if not self._record.exists():
            return
        with self._record.open("rb") as record:
            record.seek(self._read)
            for line in record:
                if line.endswith(b"\n"):
                    self._read += len(line)
                    run = json.loads(line)
                    self._runs[run["id"]] = run


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
ADDED = Topic(
    "task-added",
    "What a lock adds to a task, sending and running",
    "us",
    OURS,
    goals=dict.fromkeys((REDIS, ONCE, SINGLETON), Goal(0.8, 0.6)),
)
HAND_OVER = Topic("task-hand-over", "Hand-over of a key to a task that waits", "ms", OURS)


@contextlib.contextmanager
def load(bench: Bench) -> Iterator[Load]:
    with contextlib.ExitStack() as stack:
        socket = bench.directory / "locks.sock"
        servers.ours(bench, stack, "--unix-socket", str(socket))
        redis = stack.enter_context(stage.Redis(bench.directory))
        record = bench.directory / "runs.jsonl"
        env = {jobs.SOCKET: str(redis.socket), jobs.RECORD: str(record)}
        jobs.configure(env)
        jobs.app.conf.dflock_servers = [f"unix:{socket}"]
        worker = stage.Worker(
            bench.directory,
            app="benchmarks.loads.jobs",
            env={**env, jobs.SERVERS: f"unix:{socket}"},
        )
        stack.enter_context(worker)
        worker.wait_ready()
        tasks = Tasks(bench.directory, record)

        def measure(number: int, many: int = max(bench.scaled(TASKS), 20)) -> Figures:
            rates = {name: tasks.per_second(WAYS[name], many) for name in turned(WAYS, number)}
            few = {
                name: tasks.per_second_on_few_keys(WAYS[name], many // 5)
                for name in turned(WAITING, number)
            }
            whole, added = tasks.one_by_one(many // 6)
            hand_overs = {
                name: tasks.hand_over(WAYS[name], max(many // 50, 1))
                for name in turned((OURS, REDIS), number)
            }
            return {
                RATE.key: rates,
                FEW.key: few,
                WHOLE.key: whole,
                ADDED.key: added,
                HAND_OVER.key: hand_overs,
            }

        measure(0, many=20)
        yield Load([RATE, FEW, WHOLE, ADDED, HAND_OVER], measure)
        # It would unsubscribe at a Redis that is gone.
        jobs.app.backend.result_consumer.stop()
        jobs.app.close()
