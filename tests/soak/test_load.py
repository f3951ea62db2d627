"""A lot of everything: 5,000 connections, 100,000 held keys, 20,000 waiters of one key.

Meanwhile another process renews a lock and says how long the worst renewal took.
"""

import asyncio
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from examples.demo import stage
from tests.stalls import gaps

CONNECTIONS = 5_000
HELD = 100_000
# A connection each; as many of 20,000 as this system lets a process have.
WAITERS = min(20_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 500)
STORM = 4_000

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


class Client(asyncio.Protocol):
    """Counts reply lines; several requests may be under way."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self._wanted = 0
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.lines += data.splitlines()
        if self._done and not self._done.done() and len(self.lines) >= self._wanted:
            self._done.set_result(None)

    def send(self, *requests: bytes) -> None:
        self.lines = []
        self.transport.write(b"".join(requests))

    async def replies(self, number: int) -> list[bytes]:
        if len(self.lines) < number:
            self._wanted = number
            self._done = asyncio.get_running_loop().create_future()
            await asyncio.wait_for(self._done, 60)
        return self.lines


async def connect(path: str, number: int) -> list[Client]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_unix_connection(Client, path))[1] for _ in range(number)]


@contextmanager
def crowded_server(directory):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    path = str(directory / "s")
    flags = ("--unix-socket", path, "--max-locks", str(2 * HELD))
    with stage.LockServer(directory, *flags) as server, gaps.Prober.at(server) as prober:
        yield path, psutil.Process(server.pid), prober


async def crowd(path: str, process: psutil.Process, prober: gaps.Prober) -> dict[str, float]:
    """One round: figures by name, in milliseconds and bytes."""
    figures: dict[str, float] = {}

    @contextmanager
    def probed(what: str) -> Iterator[None]:
        with prober.watching() as found:
            yield
        figures[f"{what}, worst renewal ms"] = found[0]

    [own] = await connect(path, 1)
    with probed(f"{CONNECTIONS} connections made"):
        clients = await connect(path, CONNECTIONS)

    before = process.memory_info().rss
    each = HELD // 100
    with probed(f"{HELD} keys taken"):
        for number, client in enumerate(clients[:100]):
            keys = range(number * each, (number + 1) * each)
            client.send(*(b"l\nkey-%d\n10 600\n" % key for key in keys))
            assert all(line.startswith(b"ok ") for line in await client.replies(each))
    figures["bytes per held key"] = (process.memory_info().rss - before) / HELD

    own.send(b"l\nhot\n10 600\n")
    await own.replies(1)
    with probed(f"{STORM} waiters timed out together"):
        storm = clients[-STORM:]
        for client in storm:
            client.send(b"l\nhot\n2\n")
        for client in storm:
            assert await client.replies(1) == [b"timeout"]

    more = await connect(path, WAITERS - CONNECTIONS + 100)
    waiters = [*clients[100:], *more][:WAITERS]
    with probed(f"{len(waiters)} waiters of one key"):
        for client in waiters:
            client.send(b"l\nhot\n600\n")
        own.send(b"stats\n_\n_\n")
        await own.replies(1)
    figures["bytes with everything"] = process.memory_info().rss
    with probed("all of them gone"):
        for client in [*clients, *more]:
            client.transport.close()
        await alone(own)
    own.transport.close()
    return figures


async def alone(client: Client) -> None:
    """Wait until the server has noticed that everybody else has gone."""
    for _ in range(600):
        client.send(b"stats\n_\n_\n")
        if b'"connections":2,' in (await client.replies(1))[0]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("connections are left")


def test_a_crowd(tmp_path):
    with crowded_server(tmp_path) as (path, process, prober):
        rounds, left = [], []
        for _ in range(4):
            rounds.append(asyncio.run(crowd(path, process, prober)))
            gc.collect()
            left.append(process.memory_info().rss)

    for name in rounds[0]:
        print(name, [round(figures[name]) for figures in rounds])
    print("bytes once they had gone", left)
    for figures in rounds:
        slowest = max(value for name, value in figures.items() if name.endswith(" ms"))
        assert slowest < 1000, figures
    # The allocator keeps some of what was freed and uses it again: no round may need more.
    assert left[3] < left[1] * 1.15 + (2 << 20), left
