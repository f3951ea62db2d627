"""The CPU time that a lock adds to a task, of all processes that have a part in it.

These are the one that sends it, both of a worker (prefork, one process in its pool), Redis and our
lock server, all tied to one core. The tasks are those of `tasks`. Some of each are sent, and when all
have run and nobody has anything left to do, the CPU time of all processes is read; then comes the next
way. What is added is the difference to the tasks without a lock in the same turn, and the figure of a
round is the median of its turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil

from benchmarks import cpu, jobs
from benchmarks.bench import Bench, turned
from benchmarks.task_stage import TaskStage
from benchmarks.topic import Figures, Goal, Load, Topic

WAYS = [way for way in jobs.WAYS if way != jobs.UNIQUE]
"""That one does more than the others."""
TASKS = 30
TURNS = 4


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    goals = dict.fromkeys((jobs.REDIS, jobs.ONCE, jobs.SINGLETON), Goal(0.7, 0.5))
    added = Topic(
        "task-cpu", "CPU that a lock adds to a task, all processes", "us", jobs.OURS, goals
    )
    tasks = max(bench.scaled(TASKS), 5)
    with ExitStack() as stack, cpu.pinned(-1):
        here = TaskStage(bench, stack)
        worker = here.worker(stack, 1)
        sender = here.publisher(stack)
        children = psutil.Process(worker.pid).children(recursive=True)
        pids = [sender.pid, worker.pid, here.redis.pid, here.locks.pid]
        pids += [child.pid for child in children]

        def taken(way: str) -> float:
            """Return the microseconds of a task."""
            before = cpu.all_spent(pids)
            here.runs.of(sender.ask(f"{jobs.WAYS[way].name} {tasks}").split())
            cpu.wait_idle(*pids)
            return (cpu.all_spent(pids) - before) / tasks * 1e6

        def turn(number: int) -> dict[str, float]:
            found = {way: taken(way) for way in turned(WAYS, number)}
            plain = found.pop(jobs.PLAIN)
            return {way: each - plain for way, each in found.items()}

        def measure(number: int) -> Figures:
            turns = [turn(number + each) for each in range(TURNS)]
            return {
                added.key: {way: statistics.median(each[way] for each in turns) for way in turns[0]}
            }

        turn(0)
        yield Load([added], measure)
