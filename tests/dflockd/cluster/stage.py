"""A cluster of real lock servers over a real etcd, and a client that is nothing but the protocol.

    with Etcd(directory) as etcd, ClusterStage(directory, etcd, serving_lease=2, max_lease=6) as it:
        it.wait_settled()
        key = it.key_at(it.servers[0])

Nothing here relies on a time: what etcd, the servers and their logs say is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

from dflockd.cluster.parameters import ClusterParameters
from dflockd.shards import (
    NUM_SHARDS,
    Cluster,
    Delete,
    Put,
    Record,
    ShardRecord,
    get_shard_id,
    parse_shard_value,
)
from dflockd.shards.etcd import EtcdStore
from dflockd.shards.keys import SERVERS_MARK, SERVERS_PREFIX
from examples.demo.stage import WAIT, LockServer, StageError, wait_until
from tests.dflockd.cluster import few_shards
from tests.dflockd.ports import free_port
from tests.dflockd.raw_server import RawClient
from tests.dflockd.shards.etcd_process import Etcd

NOT_READY = ("", "error_recovering", "error_draining")

SETTLED = 60.0

LOOK = 0.2

R = TypeVar("R")


class ClusterServer(LockServer):
    """A server of a cluster, on a port that is chosen before it starts: it tells others of it."""

    module = "dflockd"
    """What is run."""
    shards = NUM_SHARDS

    def __init__(self, directory: str | Path, *args: str, name: str, port: int = 0) -> None:
        port = port or free_port()
        super().__init__(
            directory, "--advertise", f"{self.host}:{port}", *args, name=name, port=port
        )

    def _command(self) -> Sequence[str]:
        python, run, _, *arguments = super()._command()
        return [python, run, self.module, *arguments]

    def connect(self) -> RawClient:
        return RawClient(socket.create_connection((self.host, self.port), WAIT))

    def report(self) -> dict[str, Any]:
        """What it says about all shards."""
        client = self.connect()
        try:
            status, _, text = client.ask("shards").partition(" ")
        finally:
            client.close()
        if status != "ok":
            raise StageError(self.with_log(f"{self.name} answers {status!r} to `shards`"))
        report: dict[str, Any] = json.loads(text)
        return report

    def wait_joined(self) -> None:
        self.wait_log(f"{self.address} is in the cluster")


class FewShards(ClusterServer):
    """The same in a cluster of few shards, which are shared out and handed over in no time."""

    module = few_shards.__name__
    shards = few_shards.SHARDS


class Mapping:
    """What etcd says of a cluster, and what can be done to it."""

    def __init__(
        self,
        endpoint: Callable[[], str],
        prefix: str = SERVERS_PREFIX,
        num_shards: int = NUM_SHARDS,
    ) -> None:
        self._endpoint = endpoint
        self._prefix = prefix
        self._num_shards = num_shards

    def values(self) -> dict[int, bytes]:
        """The values of the shards, as they are."""
        return {int(name): record.value for name, record in self._load("shard").items()}

    def records(self) -> dict[int, ShardRecord]:
        return {shard: parse_shard_value(value) for shard, value in self.values().items()}

    def counts(self) -> Counter[str]:
        """How many shards each server has for certain; under an empty name, those on their way."""
        return Counter(
            record.current if record.current == record.target else ""
            for record in self.records().values()
        )

    def nodes(self) -> list[str]:
        """The addresses of the servers that are taken to be alive."""
        return sorted(self._load("nodes"))

    def move(self, shards: Iterable[int], to: str) -> None:
        """Say that a server is to have these shards."""
        self._run(lambda cluster: cluster.move_shards(list(shards), to))

    def rebalance(self) -> None:
        """Say that all servers are to have equally many."""
        self._run(lambda cluster: cluster.rebalance_shard_mapping(threshold=0.0))

    def pin(self, shard: int) -> None:
        async def pin(cluster: Cluster) -> None:
            mapping = await cluster.mapper.load_shard_mapping()
            await cluster.mapper.store_shard_mapping(mapping.pin(shard))

        self._run(pin)

    def put(self, name: str, value: bytes) -> None:
        """Write a key, below the prefix, as somebody would who is no server."""
        self._write(Put(f"{self._prefix}/{name}", value))

    def delete(self, name: str) -> None:
        """Delete a key, below the prefix."""
        self._write(Delete(f"{self._prefix}/{name}"))

    def _write(self, operation: Put | Delete) -> None:
        async def write(store: EtcdStore) -> None:
            await store.txn([], [operation])

        ask(self._with_store(write))

    def _load(self, folder: str) -> dict[str, Record]:
        prefix = f"{self._prefix}/{folder}/"

        async def load(store: EtcdStore) -> dict[str, Record]:
            found = (await store.get_prefix(prefix)).records
            return {key.removeprefix(prefix): record for key, record in found.items()}

        return ask(self._with_store(load))

    def _run(self, work: Callable[[Cluster], Awaitable[object]]) -> None:
        async def run(store: EtcdStore) -> None:
            options = {"prefix": self._prefix, "num_shards": self._num_shards}
            await work(Cluster(store, "stage", mark=SERVERS_MARK, **options))

        ask(self._with_store(run))

    async def _with_store(self, work: Callable[[EtcdStore], Awaitable[R]]) -> R:
        store = EtcdStore(self._endpoint().split(","), timeout=10)
        try:
            return await work(store)
        finally:
            await store.close()


class ClusterStage:
    """Servers of one cluster. They start together, and are killed with the block.

    Args:
        directory: for logs.
        etcd: what they share; it runs.
        number: of servers.
        serving_lease: of the cluster, in seconds.
        max_lease: of the cluster, in seconds.
        args: more arguments for each.
        way: the endpoint through which the server with this number reaches etcd.
        kind: of servers; with few shards unless a test is about thousands.
    """

    def __init__(
        self,
        directory: str | Path,
        etcd: Etcd,
        *args: str,
        number: int = 3,
        serving_lease: int,
        max_lease: int,
        prefix: str = SERVERS_PREFIX,
        way: Callable[[int], str] | None = None,
        kind: type[ClusterServer] = ClusterServer,
    ) -> None:
        self.etcd = etcd
        self.mapping = Mapping(lambda: etcd.endpoint, prefix, kind.shards)
        self.parameters = ClusterParameters(kind.shards, serving_lease, max_lease)
        self._kind = kind
        self._used: set[int] = set()
        self._directory = Path(directory)
        self._args = (
            *(
                "--cluster-serving-lease",
                str(serving_lease),
                "--cluster-max-lease-ttl",
                str(max_lease),
            ),
            *("--cluster-prefix", prefix, *args),
        )
        self._way = way or (lambda _: etcd.endpoint)
        self._clients: list[RawClient] = []
        self.servers: list[ClusterServer] = []
        for _ in range(number):
            self.add()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """How clients find all of them."""
        return "cluster://" + ",".join(server.address for server in self.servers[:2])

    def add(self) -> ClusterServer:
        """Another server, which is not started yet."""
        number = len(self.servers)
        server = self._kind(self._directory, *self.arguments(number), name=f"server-{number}")
        self.servers.append(server)
        return server

    def arguments(self, number: int = 0) -> Sequence[str]:
        """What makes a server one of this cluster."""
        return ("--cluster", f"etcd://{self._way(number)}", *self._args)

    def start(self) -> None:
        """Start those that do not run, and wait until they are in the cluster."""
        missing = [server for server in self.servers if not server.running]
        with ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(ClusterServer.start, missing))
        for server in missing:
            server.wait_joined()

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for server in self.servers:
            with contextlib.suppress(StageError):
                server.kill()

    # What is waited for.

    def wait_settled(self, timeout: float = SETTLED) -> Counter[str]:
        """Wait until every shard is where it is to be, with a server that is alive."""

        def probe() -> Counter[str] | None:
            # To load all shards takes a tenth of a second of etcd and of this process.
            time.sleep(LOOK)
            counts, nodes = self.mapping.counts(), self.mapping.nodes()
            is_settled = counts.total() == self.parameters.num_shards and set(counts) <= set(nodes)
            return counts if is_settled else None

        return wait_until(
            probe, timeout, lambda: f"not settled: {self.mapping.counts()}, {self.mapping.nodes()}"
        )

    def wait_gone(self, server: ClusterServer, timeout: float = SETTLED) -> None:
        """Wait until etcd takes a server for dead."""
        wait_until(
            lambda: server.address not in self.mapping.nodes() or None,
            timeout,
            lambda: f"{server.address} is alive in etcd: {self.mapping.nodes()}",
        )

    def move(self, shards: Iterable[int], to: ClusterServer) -> None:
        """Have shards moved to a server, and wait until it has them."""
        wanted = set(shards)
        self.mapping.move(wanted, to.address)

        def probe() -> bool | None:
            records = self.mapping.records()
            return all(records[shard].current == to.address for shard in wanted) or None

        wait_until(probe, SETTLED, lambda: f"{to.name} did not get all of {len(wanted)} shards")

    # Keys and clients.

    def key_at(self, server: ClusterServer) -> str:
        """A key of a shard that nobody has had a key of; it is with that server, moved if need be."""
        keys = (f"key-{number}" for number in _numbers)
        key = next(key for key in keys if self.shard_of(key) not in self._used)
        shard = self.shard_of(key)
        self._used.add(shard)
        if self.mapping.records()[shard].current != server.address:
            self.move([shard], server)
        # What etcd has stored, the server that asked for it hears a moment later.
        client = server.connect()
        with contextlib.closing(client):
            wait_until(
                lambda: not client.ask("i", key).startswith("error_recovering") or None,
                SETTLED,
                lambda: f"{server.name} does not serve {key}",
            )
        return key

    def shard_of(self, key: str) -> int:
        return get_shard_id(key, self.parameters.num_shards)

    def connect(self, server: ClusterServer) -> RawClient:
        """A connection that is closed with the stage."""
        client = server.connect()
        self._clients.append(client)
        return client

    def follow(
        self, command: str, key: str, argument: object, *, timeout: float = WAIT
    ) -> tuple[RawClient | None, str]:
        """Ask whoever is in charge of a key, for so long as nobody is ready to answer.

        Returns:
            The connection, and the answer; nothing and an empty one if there was none.
        """
        until = time.monotonic() + timeout
        server = self.any
        while True:
            client, line = None, ""
            with contextlib.suppress(OSError):
                client = self.connect(server)
                line = client.ask(command, key, argument)
            status, *fields = line.split() or [""]
            if status == "error_moved":
                server = self.at(fields[2])
            elif status not in NOT_READY or time.monotonic() > until:
                return client, line
            else:
                time.sleep(0.01)
                server = self.any
            if client is not None:
                client.close()

    @property
    def any(self) -> ClusterServer:
        """A server that runs."""
        return random.choice([server for server in self.servers if server.running])

    def at(self, address: str) -> ClusterServer:
        """The server with this address."""
        [found] = [server for server in self.servers if server.address == address]
        return found


_numbers = itertools.count()


@contextlib.contextmanager
def settled(
    directory: Path, *flags: str, lease: int, serving_lease: int = 2, number: int = 3
) -> Iterator[ClusterStage]:
    """Servers of few shards, over an etcd of their own, that have shared them out."""
    times = {"serving_lease": serving_lease, "max_lease": lease}
    with (
        Etcd(directory) as etcd,
        ClusterStage(directory, etcd, *flags, number=number, kind=FewShards, **times) as stage,
    ):
        stage.wait_settled()
        yield stage


def ask(work: Coroutine[Any, Any, R]) -> R:
    """Carry out something asynchronous, from any thread.

    All of it on one loop: gRPC complains of each loop that was closed (grpc/grpc, issue 25364), as
    `asyncio.run` does.
    """
    return asyncio.run_coroutine_threadsafe(work, _loop()).result(SETTLED)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="stage", daemon=True).start()
    return loop
