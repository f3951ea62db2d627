"""The instructions of ``with DistributedLock(...): pass`` in a program, when the lock is free.

Of the program's process alone, in user space; lock server and Redis run as always. The ways are
those of `with_lock`, and the client for asyncio.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks import servers
from benchmarks.bench import Bench
from benchmarks.callgrind import Callgrind
from benchmarks.child import Child
from benchmarks.topic import Figures, Load, Topic
from benchmarks.turns import ASYNCIO, BARE, OURS, REDIS

TURNS = (50, 250)


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    callgrind = Callgrind(bench.directory)
    title = "Instructions of with lock: pass"
    tcp = Topic("with-lock-instructions-tcp", f"{title}, over TCP", "Ir", OURS)
    unix = Topic("with-lock-instructions-unix", f"{title}, over unix sockets", "Ir", OURS)
    with ExitStack() as stack:
        path = bench.directory / "locks.sock"
        server = servers.ours(bench, stack, "--unix-socket", str(path))
        broker = stack.enter_context(servers.TcpRedis(bench.directory))
        addresses = {
            tcp: (f"127.0.0.1:{server.port}", f"127.0.0.1:{broker.port}"),
            unix: (f"unix:{path}", f"unix:{broker.socket}"),
        }

        program = (sys.executable, "-m", "benchmarks.programs.locker")
        locker = stack.enter_context(Child(*callgrind.prefix, *program))

        def counted(way: str, address: str) -> float:
            def run(turns: float) -> int:
                locker.ask(json.dumps([way, address, turns]))
                return int(turns)

            return sum(callgrind.per_turn(locker.pid, run, TURNS).values())

        def measure(_: int) -> Figures:
            return {
                topic.key: {
                    OURS: counted(OURS, locks),
                    ASYNCIO: counted(ASYNCIO, locks),
                    BARE: counted(BARE, locks),
                    REDIS: counted(REDIS, theirs),
                }
                for topic, (locks, theirs) in addresses.items()
            }

        yield Load([tcp, unix], measure, rounds=1)
