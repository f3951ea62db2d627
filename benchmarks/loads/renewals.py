"""What it takes to keep 10,000 locks.

One process of the blocking client holds them all, each over a connection of its own, with leases of
30 s, which it renews at half of that, a little early. CPU time of the server and of that process
over 20 s, as a share of one core. What a day of it takes is that share of a day.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks import cpu, servers
from benchmarks.bench import Bench, LeftOutError
from benchmarks.child import Child
from benchmarks.topic import Figures, Goal, Load, Topic

HELD = 10_000
LEASE = 30
QUICK_LEASE = 2
SPARE = 500
"""Files that a process has open anyway."""


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    held = bench.scaled(HELD)
    lease = QUICK_LEASE if bench.quick else LEASE
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < held + SPARE:
        raise LeftOutError(f"{held + SPARE:,} open files are needed: raise `ulimit -n`")
    of_server, of_client = (
        Topic(key, f"Renewals of {held:,} locks, {who}", "% of a core", servers.OURS, limit=limit)
        for key, who, limit in (
            ("renewals-server", "the server", Goal(2.0, 1.0)),
            ("renewals-client", "the program that holds them", Goal(5.0, 2.0)),
        )
    )
    with ExitStack() as stack:
        server = servers.ours(bench, stack)
        arguments = map(str, (server.port, held, lease))
        holder = stack.enter_context(Child.of("benchmarks.programs.renewer", *arguments))

        def shares() -> tuple[float, float]:
            began, used = time.monotonic(), cpu.spent(server.pid)
            client_used, _ = holder.ask().split()
            time.sleep(lease * 2 / 3)
            client_now, still = holder.ask().split()
            seconds = time.monotonic() - began
            if int(still) < held:
                raise RuntimeError(f"{held - int(still)} of {held} locks were lost")
            of_client = float(client_now) - float(client_used)
            return (cpu.spent(server.pid) - used) / seconds, of_client / seconds

        def measure(_: int) -> Figures:
            server_share, client_share = shares()
            return {
                of_server.key: {servers.OURS: server_share * 100},
                of_client.key: {servers.OURS: client_share * 100},
            }

        yield Load([of_server, of_client], measure, rounds=1)
