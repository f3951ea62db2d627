"""Whether two servers that share the keys do twice the work of one.

On one core a server and a load of 64 connections; on two cores the same twice, with the keys shared
out over both servers by their hash, so that half of each load goes to the server on the other core.
The load takes its part of each core, the same in both, and that is what a machine of two cores can
show: that servers take nothing from one another. How much one server answers that has a core for
itself, see `server_cpu`: a second divided by the CPU time of one lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks import cpu, servers
from benchmarks.bench import Bench, LeftOutError, turned
from benchmarks.exchange import WARM_UP, ExchangeProcess, together
from benchmarks.topic import Figures, Goal, Load, Topic

ONE = "one server, one core"
TWO = "two servers, two cores"
CONNECTIONS = 64


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    if len(cpu.CORES) < 2:
        raise LeftOutError("two cores are needed")
    rate = Topic(
        "two-servers",
        "Locks per second, keys sharded over two servers",
        "/s",
        TWO,
        {ONE: Goal(1.7)},
        more_is_better=True,
    )
    cost = Topic("two-servers-cpu", "Server CPU per acquire + release, keys sharded", "us", TWO)
    with ExitStack() as stack:
        pair = []
        for core in (0, 1):
            with cpu.pinned(core):
                pair.append(servers.ours(bench, stack, name=f"server-{core}"))
        ports = [server.port for server in pair]
        with cpu.pinned(0):
            one = [stack.enter_context(ExchangeProcess(ports[:1], CONNECTIONS, "one"))]
        two = []
        for core in (0, 1):
            with cpu.pinned(core):
                process = ExchangeProcess(ports, CONNECTIONS, f"two-{core}")
                two.append(stack.enter_context(process))
        compared: dict[str, Sequence[ExchangeProcess]] = {TWO: two, ONE: one}

        def measure(number: int) -> Figures:
            rates, costs = {}, {}
            for name in turned(compared, number):
                together(compared[name], bench.seconds * WARM_UP)
                before = sum(cpu.spent(server.pid) for server in pair)
                run = together(compared[name], bench.seconds)
                used = sum(cpu.spent(server.pid) for server in pair) - before
                rates[name] = run.per_second
                costs[name] = used / run.turns * 1e6
            return {rate.key: rates, cost.key: costs}

        yield Load([rate, cost], measure)
