"""What those who wait for one lock cost those who do not.

A worker of two processes, with Celery's default settings, finds 200 messages in its queue, by turns
one for the same key, which somebody else holds, and one with a key of its own. The holder lets go
once the 100 others are done, or after `HELD` seconds. Then the first 100 follow. They wait in the
consumer, in their slot, by being sent again, or in their slot for a redis-py `Lock`, with its default
of a try each 0.1 s. Each way is run without the 100 that wait as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import redis

from benchmarks import jobs
from benchmarks.bench import Bench, turned
from benchmarks.task_stage import TaskStage
from benchmarks.topic import Figures, Load, Topic
from dflockd.sync_client import DistributedLock
from examples.demo import stage

TASKS = 100
WORK = 0.05
"""Seconds that a task takes."""
HELD = 5.0
"""Seconds after which the holder lets go at the latest."""

SPEED = Topic(
    "waiting-others",
    "Speed of the tasks that do not wait, of what it is without those that do",
    "",
    more_is_better=True,
)
OVERTAKEN = Topic("waiting-overtaken", f"Of {TASKS} that wait, overtaken by a later one", "")


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    tasks = max(bench.scaled(TASKS), 10)
    keys = iter(range(1_000_000))
    with ExitStack() as stack:
        here = TaskStage(bench, stack)
        publisher = here.publisher(stack)

        def hold(way: str, key: str) -> Any:
            """Return the lock of the key, which is held."""
            if jobs.WAITING[way] is jobs.waits_for_redis:
                lock = redis.Redis(unix_socket_path=str(here.redis.socket)).lock(
                    f"lock:{key}", timeout=600
                )
            else:
                lock = DistributedLock(key, servers=[here.env[jobs.SERVERS]])
            lock.acquire()
            return lock

        def run(way: str, waiting: int) -> tuple[float, int]:
            """Return the seconds that the others took, and how many were overtaken."""
            hot = f"hot:{next(keys)}"
            lock = hold(way, hot)

            def send(key: str) -> str:
                return publisher.ask(f"{jobs.WAITING[way].name} 1 {key} {WORK}").strip()

            hot_ids, own_ids = [], []
            for number in range(tasks):
                if number < waiting:
                    hot_ids.append(send(hot))
                own_ids.append(send(f"own:{next(keys)}"))
            with ExitStack() as worker:
                here.worker(worker, 2)
                own = None
                with suppress(stage.StageError):
                    own = here.runs.of(own_ids, HELD)
                lock.release()
                own = own or here.runs.of(own_ids)
                begins = [each["begin"] for each in here.runs.of(hot_ids)]
            took = max(each["end"] for each in own) - min(each["begin"] for each in own)
            return took, sum(
                begin > min(begins[number + 1 :], default=begin)
                for number, begin in enumerate(begins)
            )

        def measure(number: int) -> Figures:
            alone = {way: run(way, 0) for way in turned(jobs.WAITING, number)}
            beside = {way: run(way, tasks) for way in turned(jobs.WAITING, number)}
            return {
                SPEED.key: {way: alone[way][0] / beside[way][0] for way in jobs.WAITING},
                OVERTAKEN.key: {way: beside[way][1] for way in jobs.WAITING},
            }

        yield Load([SPEED, OVERTAKEN], measure, rounds=1)
