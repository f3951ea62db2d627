"""The instructions that a lock takes: in the server, in a program, and in a task.

In user space, of one process each; the others run as always.

- *The server*: an acquire and its release, 16 connections; what is compared is that of `server_cpu`.
  The server in Go is left out: valgrind does not run what Go compiles.
- *A program*: ``with DistributedLock(...): pass`` when the lock is free, over TCP, with the blocking
  client (`with_lock`) and with the one for asyncio.
- *A task*: what a lock adds in a process of the worker's pool (`benchmarks.programs.runner`), and in
  one that sends (`benchmarks.programs.publisher`), to the task without one. The tasks are those of
  `tasks`, and one with ``lock_unique``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from benchmarks import jobs, servers
from benchmarks.bench import Bench
from benchmarks.callgrind import Callgrind
from benchmarks.child import Child
from benchmarks.exchange import Exchange
from benchmarks.task_stage import TaskStage
from benchmarks.topic import Figures, Goal, Load, Topic
from benchmarks.turns import ASYNCIO, BARE, OURS, REDIS, REDIS_ASYNCIO

CONNECTIONS = 16
SECONDS = (0.5, 2.0)
"""Of a short run of a server and of a long one."""
TURNS = (50, 250)
"""Of a program."""
TASKS = (5, 25)

SERVER = Topic(
    "server-instructions",
    f"Instructions of an acquire + release in the server, {CONNECTIONS} connections",
    "Ir",
    servers.OURS,
)
SERVER_WHERE = Topic("server-instructions-where", "Where those of our server are", "Ir")
WITH = Topic("with-lock-instructions", "Instructions of with lock: pass, over TCP", "Ir", OURS)
ASYNC_WITH = Topic(
    "async-with-lock-instructions",
    "Instructions of async with lock: pass, over TCP",
    "Ir",
    ASYNCIO,
    {REDIS_ASYNCIO: Goal(0.22, 0.18)},
)
TASK = Topic(
    "task-instructions",
    "Instructions that a lock adds to a task, where it is sent and where it runs",
    "Ir",
    jobs.OURS,
    {jobs.ONCE: Goal(0.6, 0.4), jobs.SINGLETON: Goal(0.6, 0.4)},
)
"""Both: celery-once and celery-singleton take the lock where the task is sent."""
RUN = Topic(
    "task-instructions-run", "Instructions that a lock adds to running a task", "Ir", jobs.OURS
)
RUN_WHERE = Topic("task-instructions-run-where", "Where those around a task are", "Ir")
SENT = Topic(
    "task-instructions-sent", "Instructions that a lock adds to sending a task", "Ir", jobs.OURS
)


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    callgrind = Callgrind(bench.directory)
    with ExitStack() as stack:
        served = servers.all_in_python(bench, stack, callgrind.prefix)
        here = TaskStage(bench, stack)

        def of_server(server: servers.Server) -> dict[str, float]:
            with Exchange([server.port], CONNECTIONS) as exchange:
                return callgrind.per_turn(
                    server.pid, lambda seconds: exchange.run(seconds).turns, SECONDS
                )

        def of_programs() -> dict[str, float]:
            locks = servers.ours(bench, stack, name="of-programs")
            broker = stack.enter_context(servers.TcpRedis(bench.directory))
            ours, theirs = (f"127.0.0.1:{each.port}" for each in (locks, broker))
            addresses = {
                **dict.fromkeys((OURS, ASYNCIO, BARE), ours),
                **dict.fromkeys((REDIS, REDIS_ASYNCIO), theirs),
            }
            with Child.of("benchmarks.programs.locker", prefix=callgrind.prefix) as locker:

                def counted(way: str) -> float:
                    def run(turns: float) -> int:
                        locker.ask(json.dumps([way, addresses[way], turns]))
                        return int(turns)

                    return sum(callgrind.per_turn(locker.pid, run, TURNS).values())

                return {way: counted(way) for way in addresses}

        def added(program: str, ways: Iterable[str]) -> dict[str, dict[str, float]]:
            """Return what each way adds, by place."""
            prefix = [*here.prefix, *callgrind.prefix]
            with Child.of(f"benchmarks.programs.{program}", prefix=prefix) as child:

                def taken(way: str) -> dict[str, float]:
                    def take(number: float) -> int:
                        child.ask(f"{jobs.WAYS[way].name} {number}")
                        return int(number)

                    return callgrind.per_turn(child.pid, take, TASKS)

                plain = taken(jobs.PLAIN)
                return {
                    way: {place: count - plain.get(place, 0) for place, count in taken(way).items()}
                    for way in ways
                }

        def measure(_: int) -> Figures:
            server = {name: of_server(each) for name, each in served.items()}
            program = of_programs()
            # One that was not sent has no lock of its own to give back.
            run = added("runner", (jobs.OURS, jobs.REDIS, jobs.ONCE, jobs.SINGLETON, jobs.BARE))
            sent = added("publisher", (jobs.OURS, jobs.UNIQUE, jobs.ONCE, jobs.SINGLETON))
            of_run, of_sent = whole(run), whole(sent)
            both = (jobs.OURS, jobs.ONCE, jobs.SINGLETON)
            return {
                SERVER.key: whole(server),
                SERVER_WHERE.key: server[servers.OURS],
                WITH.key: {way: program[way] for way in (OURS, BARE, REDIS)},
                ASYNC_WITH.key: {way: program[way] for way in (ASYNCIO, REDIS_ASYNCIO)},
                TASK.key: {way: of_run[way] + of_sent[way] for way in both},
                RUN.key: of_run,
                RUN_WHERE.key: run[jobs.OURS],
                SENT.key: of_sent,
            }

        yield Load([SERVER, SERVER_WHERE, WITH, ASYNC_WITH, TASK, RUN, RUN_WHERE, SENT], measure, 1)


def whole(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the instructions of all places together, by name."""
    return {name: sum(places.values()) for name, places in found.items()}
