"""The instructions that a lock adds to a task: where it runs, and where it is sent from.

In user space, in a process of the worker's pool (`benchmarks.programs.runner`) and in one that
sends (`benchmarks.programs.publisher`); what is added is the difference to the task without a lock.
The tasks are those of `tasks`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.bench import Bench
from benchmarks.callgrind import Callgrind
from benchmarks.child import Child
from benchmarks.loads.tasks import ONCE, OURS, PLAIN, REDIS, SINGLETON, UNIQUE, WAYS
from benchmarks.task_stage import TaskStage
from benchmarks.topic import Figures, Goal, Load, Topic

RUNNER = "benchmarks.programs.runner"
PUBLISHER = "benchmarks.programs.publisher"
GOALS = dict.fromkeys((REDIS, ONCE, SINGLETON), Goal(0.5, 0.2))
NUMBERS = (5, 25)
"""Tasks of a short run and of a long one."""


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    callgrind = Callgrind(bench.directory)
    run = Topic(
        "task-instructions-run",
        "Instructions that a lock adds to running a task",
        "Ir",
        OURS,
        GOALS,
    )
    sent = Topic(
        "task-instructions-sent", "Instructions that a lock adds to sending a task", "Ir", OURS
    )
    with ExitStack() as stack:
        here = TaskStage(bench, stack)

        def added(module: str, ways: Iterable[str]) -> dict[str, float]:
            with Child(*here.prefix, *callgrind.prefix, sys.executable, "-m", module) as program:

                def taken(way: str) -> float:
                    def take(number: float) -> int:
                        program.ask(f"{WAYS[way].name} {number}")
                        return int(number)

                    return sum(callgrind.per_turn(program.pid, take, NUMBERS).values())

                plain = taken(PLAIN)
                return {way: taken(way) - plain for way in ways}

        def measure(_: int) -> Figures:
            ways = [way for way in WAYS if way != PLAIN]
            return {
                # One that was not sent has no lock of its own to give back.
                run.key: added(RUNNER, [way for way in ways if way != UNIQUE]),
                sent.key: added(PUBLISHER, ways),
            }

        yield Load([run, sent], measure, rounds=1)
