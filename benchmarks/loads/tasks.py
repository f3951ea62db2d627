"""How many tasks a second a real worker runs, with a lock and without, on Redis and on RabbitMQ.

One worker (prefork, two processes, Celery's default settings) has the same task that does nothing:
without a lock, as a `LockedTask`, with a redis-py `Lock` in its body, and with the base classes of
celery-once and celery-singleton. Each task has a key of its own, so that nobody waits. All share the
worker, its warm connections and the round. Redis is the lock store of the others; it and our lock
server are reached over unix sockets.

Both processes are kept busy until all tasks are in the queue. Then time counts from the beginning of
the first to the end of the last, Celery's own part included, results ignored. What a library does
when a task is *sent* is not in it: celery-once and celery-singleton lock then.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from benchmarks import jobs
from benchmarks.bench import Bench, turned
from benchmarks.task_stage import TaskStage
from benchmarks.topic import Figures, Goal, Load, Topic
from tests import rabbitmq

COMPARED = (jobs.OURS, jobs.PLAIN, jobs.REDIS, jobs.ONCE, jobs.SINGLETON)
TASKS = 400
"""Sent for one figure."""

TOPICS = {
    broker: Topic(
        f"tasks-{broker.lower()}",
        f"A worker's tasks per second on {broker}",
        "/s",
        jobs.OURS,
        {jobs.PLAIN: Goal(0.9, 0.95)},
        more_is_better=True,
    )
    for broker in ("Redis", "RabbitMQ")
}


@contextlib.contextmanager
def load(bench: Bench) -> Iterator[Load]:
    topics = dict(TOPICS)
    if missing := rabbitmq.missing():
        bench.left_out["tasks on RabbitMQ"] = missing
        del topics["RabbitMQ"]
    many = max(bench.scaled(TASKS), 20)
    numbers = itertools.count()

    def per_second(broker: str, way: str) -> float:
        here, publisher = stages[broker]
        gate = here.directory / f"gate-{next(numbers)}"
        publisher.ask(f"{jobs.occupy.name} 2 {gate}")
        sent = publisher.ask(f"{jobs.WAYS[way].name} {many}").split()
        gate.touch()
        runs = here.runs.of(sent)
        seconds = max(run["postrun"] for run in runs) - min(run["prerun"] for run in runs)
        return many / float(seconds)

    def measure(number: int) -> Figures:
        return {
            topic.key: {way: per_second(broker, way) for way in turned(COMPARED, number)}
            for broker, topic in topics.items()
        }

    with contextlib.ExitStack() as stack:
        stages = {}
        for broker in topics:
            directory = bench.directory / broker
            directory.mkdir()
            url = None
            if broker == "RabbitMQ":
                url = stack.enter_context(rabbitmq.RabbitMQ(directory)).url
            here = TaskStage(bench, stack, directory, url)
            here.worker(stack, 2)
            stages[broker] = here, here.publisher(stack)
        measure(0)  # connections are made; it does not count
        yield Load(list(topics.values()), measure)
