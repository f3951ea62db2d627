"""The lock servers of a run as one cluster: a real etcd, and links between it and each of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

from dflockd.cluster import ClusterParameters
from dflockd.errors import InvalidArgumentError
from dflockd.shards import Put, ShardConflictError, StoreError, get_shard_id
from dflockd.shards.etcd import EtcdStore
from examples.demo.stage import LockServer, StageError, wait_until
from tests.chaos.network import Link, Network, Way
from tests.chaos.options import Options, all_key_names
from tests.chaos.processes import Server
from tests.dflockd.cluster.stage import Mapping, ask
from tests.dflockd.ports import free_port
from tests.dflockd.shards.etcd_cluster import EtcdCluster

SEEDS = 2
"""Servers that a client is told of: it has to find the others."""

PATIENCE = 60.0

LIMITS = (
    *("--quota-backend-bytes", str(48 << 20)),
    *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "10s"),
)
"""So that etcd can be filled, and is not by itself."""

UNCHANGED = (StoreError, ShardConflictError, InvalidArgumentError, IndexError)
"""Servers may come and go, all of them too, and etcd be away: then nothing is moved this time."""


class ClusterOfServers:
    """Servers, and one more that joins them now and then.

    Attributes:
        etcd: what they share; each member of it is in `members`.
        peers: the ways of the members to each other, if there are several.
        servers: those that are started at the beginning.
        spare: the one that is not.
        links: the way of all clients to each server, the spare one's last.
        ties: the ways of each server to the members of etcd, as well.
        mapping: what etcd says.
    """

    def __init__(
        self,
        options: Options,
        parameters: ClusterParameters,
        network: Network,
        opened: contextlib.ExitStack,
    ) -> None:
        self._keys = all_key_names(options.keys)
        self.etcd = EtcdCluster(options.directory, options.etcd, more=LIMITS)
        self.members = self.etcd.members
        self.peers: list[Link] = []
        for member in self.members if options.etcd > 1 else ():
            peer = network.link(member.peer_port)
            opened.callback(peer.close)
            member.peer_way = peer.port
            self.peers.append(peer)
        opened.enter_context(self.etcd)
        self.mapping = Mapping(lambda: self.etcd.endpoint)
        self.links: list[Link] = []
        self.ties: list[Ties] = []
        made: list[Server] = []
        for number in range(options.servers + 1):
            port = free_port()
            link = network.link(port)
            ties = Ties([network.link(member.port) for member in self.members])
            for each in (link, *ties.links):
                opened.callback(each.close)
            self.links.append(link)
            self.ties.append(ties)
            made.append(Server(options, number, *_arguments(link, ties, parameters), port=port))
        *self.servers, self.spare = made
        opened.callback(self.spare.kill)
        for server in self.servers:
            opened.enter_context(server)
        wait_until(lambda: self._has_begun() or None, PATIENCE, lambda: str(self.mapping.counts()))
        # Who came later than the others has no shards yet.
        self.rebalance()
        wait_until(lambda: self._is_ready() or None, PATIENCE, lambda: str(self.mapping.counts()))

    @property
    def address(self) -> str:
        """How clients find all of them."""
        seeds = ",".join(f"127.0.0.1:{link.port}" for link in self.links[:SEEDS])
        return f"cluster://{seeds}"

    def move_some(self, chance: random.Random) -> None:
        """Give the shards of half of the keys to one server."""
        shards = [get_shard_id(key) for key in chance.sample(self._keys, len(self._keys) // 2)]
        with contextlib.suppress(*UNCHANGED):
            self.mapping.move(shards, chance.choice(self.mapping.nodes()))

    def rebalance(self) -> None:
        """Give all servers equally many shards."""
        with contextlib.suppress(*UNCHANGED):
            self.mapping.rebalance()

    def fill(self) -> None:
        """Have etcd take nothing new any more, unless it is away."""

        async def put_until_it_is_full() -> None:
            store = EtcdStore(self.etcd.endpoint.split(","), timeout=PATIENCE)
            with contextlib.suppress(StoreError):
                while True:
                    await store.txn([], [Put("/else", b"x" * 1_000_000)])
            await store.close()

        ask(put_until_it_is_full())

    def make_room(self) -> None:
        """Do what the manual says about a database that is full, as soon as all members let one."""

        def probe() -> bool | None:
            try:
                self.etcd.make_room()
            except StageError:
                return None
            return True

        wait_until(probe, PATIENCE, lambda: "no room can be made in etcd")

    def _has_begun(self) -> bool:
        counts = self.mapping.counts()
        return bool(counts) and not counts[""] and len(self.mapping.nodes()) == len(self.servers)

    def _is_ready(self) -> bool:
        counts = self.mapping.counts()
        return bool(counts) and not counts[""] and len(counts) == len(self.servers)


class Ties:
    """The ways of one server to all members of etcd."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = links

    def cut(self) -> None:
        for link in self.links:
            link.cut()

    def hold(self, *ways: Way) -> None:
        for link in self.links:
            link.hold(*ways)

    def refuse(self) -> None:
        for link in self.links:
            link.refuse()

    def pass_on(self) -> None:
        for link in self.links:
            link.pass_on()


def _arguments(link: Link, ties: Ties, parameters: ClusterParameters) -> Sequence[str]:
    return (
        *("--cluster", "etcd://" + ",".join(f"127.0.0.1:{link.port}" for link in ties.links)),
        *("--advertise", f"{LockServer.host}:{link.port}"),
        *("--cluster-serving-lease", str(parameters.serving_lease)),
        *("--cluster-max-lease-ttl", str(parameters.max_lease)),
    )
