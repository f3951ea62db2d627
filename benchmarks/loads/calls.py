"""The calls of Python and C functions that a lock takes, and whose they are.

Of ``with DistributedLock(...): pass`` in a program, and of a lock around a task in a process of a
worker's pool, less those of the task without one (`benchmarks.programs.runner`). They are the same in
every round, and say what there is to leave out, which instructions do not.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.bench import Bench
from benchmarks.calls import calls
from benchmarks.child import Child
from benchmarks.loads.tasks import OURS as TASK
from benchmarks.loads.tasks import PLAIN, UNIQUE, WAYS
from benchmarks.task_stage import TaskStage
from benchmarks.topic import Figures, Load, Topic
from benchmarks.turns import BARE, OURS, REDIS
from benchmarks.turns import WAYS as TURNS

NUMBER = 100


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    program = Topic("with-lock-calls", "Calls of with lock: pass", "calls", OURS)
    program_whose = Topic("with-lock-calls-whose", "Whose those of with lock: pass are", "calls")
    task = Topic("task-calls", "Calls that a lock adds to running a task", "calls", TASK)
    task_whose = Topic("task-calls-whose", "Whose those around a task are", "calls")
    with ExitStack() as stack:
        here = TaskStage(bench, stack)
        command = (sys.executable, "-m", "benchmarks.programs.runner")
        runner = stack.enter_context(Child(*here.prefix, *command))

        def of_program(way: str) -> dict[str, float]:
            server = here.redis.socket if way == REDIS else here.socket
            turns = TURNS[way](f"unix:{server}")
            turns(NUMBER)
            return calls(turns, NUMBER)

        def of_task(way: str) -> Counter[str]:
            runner.ask(f"{WAYS[way].name} {NUMBER}")
            return Counter(json.loads(runner.ask(f"{WAYS[way].name} {NUMBER} calls")))

        def measure(_: int) -> Figures:
            programs = {way: of_program(way) for way in (OURS, BARE, REDIS)}
            tasks = {way: of_task(way) for way in WAYS if way != UNIQUE}
            plain = tasks.pop(PLAIN)
            for each in tasks.values():
                each.subtract(plain)
            return {
                program.key: {way: sum(each.values()) for way, each in programs.items()},
                program_whose.key: programs[OURS],
                task.key: {way: each.total() for way, each in tasks.items()},
                task_whose.key: {who: made for who, made in tasks[TASK].items() if made >= 0.5},
            }

        yield Load([program, program_whose, task, task_whose], measure, rounds=1)
