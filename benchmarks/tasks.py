"""What a lock costs a task in a real worker.

One worker (prefork, two processes) has the same task that does nothing six times: without a lock, as
a `LockedTask`, as one with ``lock_unique``, with a redis-py `Lock` in its body, and with the base
classes of celery-once and celery-singleton. All share the worker, its warm connections and the
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
import functools
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from celery import Task

from benchmarks import Measure, Measures, jobs
from examples.demo import stage

OURS = "LockedTask"
PLAIN = "no lock"
REDIS = "redis-py Lock in the body"
WAYS = {
    OURS: jobs.locked,
    PLAIN: jobs.plain,
    "LockedTask with lock_unique": jobs.unique,
    REDIS: jobs.redis_lock,
    "celery-once": jobs.once,
    "celery-singleton": jobs.singleton,
}

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


class InTurn:
    """A figure for each name, from one measurement of all; a new one when a name comes again."""

    def __init__(self, measure: Callable[[], dict[str, float]]) -> None:
        self._measure = measure
        self._left = measure()

    def __call__(self, name: str) -> float:
        if name not in self._left:
            self._left = self._measure()
        return self._left.pop(name)


class Bench:
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

    def latencies(self, number: int) -> dict[str, float]:
        """Microseconds from sending a task to its result."""
        turns = self._turns(number)
        return {name: statistics.median(turn[name].whole for turn in turns) * 1e6 for name in WAYS}

    def added(self, number: int) -> dict[str, float]:
        """Microseconds that a task costs more than without a lock, beside it in the same turn."""
        turns = self._turns(number)
        return {
            name: statistics.median(turn[name].cost - turn[PLAIN].cost for turn in turns) * 1e6
            for name in WAYS
        }

    def _turns(self, number: int) -> list[dict[str, Sample]]:
        """Send one task after the other; who comes first changes from turn to turn."""
        names = list(WAYS)
        called: list[dict[str, Call]] = []
        for turn in range(number):
            first = turn % len(names)
            called.append({name: self._call(WAYS[name]) for name in names[first:] + names[:first]})
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


@contextlib.contextmanager
def topics(
    directory: Path, redis: stage.Redis, locks_socket: Path, number: int
) -> Iterator[dict[str, Measures]]:
    """Start the worker, and give the measures by topic; `number` tasks for a throughput."""
    record = directory / "runs.jsonl"
    env = {jobs.SOCKET: str(redis.socket), jobs.RECORD: str(record)}
    jobs.configure(env)
    jobs.app.conf.dflock_servers = [f"unix:{locks_socket}"]
    with stage.Worker(
        directory,
        app="benchmarks.jobs",
        env={**env, "DFLOCK_SERVERS": f"unix:{locks_socket}"},
    ) as worker:
        worker.wait_ready()
        bench = Bench(directory, record)
        some = max(number // 20, 5)
        waiting = {name: WAYS[name] for name in (OURS, PLAIN, REDIS)}
        latencies = InTurn(functools.partial(bench.latencies, 2 * some))
        added = InTurn(functools.partial(bench.added, 2 * some))
        yield {
            "a worker's tasks per second, a key each (more is better)": {
                name: warm(functools.partial(bench.per_second, task, number))
                for name, task in WAYS.items()
            },
            f"a worker's tasks of {WORK * 1e3:g} ms per second, {FEW_KEYS} keys (more is better)": {
                name: warm(functools.partial(bench.per_second_on_few_keys, task, number // 5))
                for name, task in waiting.items()
            },
            "one task, apply_async().get() (us)": {
                name: functools.partial(latencies, name) for name in WAYS
            },
            "what a lock adds to one task, sending and running (us)": {
                name: functools.partial(added, name) for name in WAYS if name != PLAIN
            },
            "hand-over of a key to a task that waits (ms)": {
                name: warm(functools.partial(bench.hand_over, WAYS[name], some // 4))
                for name in (OURS, REDIS)
            },
        }
        # It would unsubscribe at a Redis that is gone.
        jobs.app.backend.result_consumer.stop()
        jobs.app.close()


def warm(measure: Measure) -> Measure:
    measure()
    return measure
