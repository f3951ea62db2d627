"""The lock servers of a run as one cluster: a real etcd, and links between it and each of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

from dflockd.cluster import Terms
from dflockd.errors import InvalidArgumentError
from dflockd.shards import ShardConflictError, StoreError, get_shard_id
from examples.demo.stage import LockServer, wait_until
from tests.chaos.network import Link, Network
from tests.chaos.options import Options, key_names
from tests.chaos.processes import Server
from tests.dflockd.cluster.stage import Mapping, free_port
from tests.dflockd.shards.etcd_process import Etcd

SEEDS = 2
"""Servers that a client is told of: it has to find the others."""

PATIENCE = 60.0

UNCHANGED = (StoreError, ShardConflictError, InvalidArgumentError, IndexError)
"""Servers may come and go, all of them too, and etcd be away: then nothing is moved this time."""


class ClusterOfServers:
    """Servers, and one more that joins them now and then.

    Attributes:
        etcd: what they share.
        servers: those that are started at the beginning.
        spare: the one that is not.
        links: the way of all clients to each server, the spare one's last.
        ties: the way of each server to etcd, as well.
        mapping: what etcd says.
    """

    def __init__(
        self, options: Options, terms: Terms, network: Network, opened: contextlib.ExitStack
    ) -> None:
        self._keys = [*key_names(options.keys), *(f"several-{k}" for k in key_names(options.keys))]
        self.etcd = Etcd(options.directory)
        # Of those that no outgoing connection takes while it is restarted.
        self.etcd.port = free_port()
        opened.enter_context(self.etcd)
        self.mapping = Mapping(lambda: self.etcd.endpoint)
        self.links: list[Link] = []
        self.ties: list[Link] = []
        made: list[Server] = []
        for number in range(options.servers + 1):
            port = free_port()
            link, tie = network.link(port), network.link(self.etcd.port)
            for each in (link, tie):
                opened.callback(each.close)
            self.links.append(link)
            self.ties.append(tie)
            made.append(Server(options, number, *_arguments(link, tie, terms), port=port))
        *self.servers, self.spare = made
        opened.callback(self.spare.kill)
        for server in self.servers:
            opened.enter_context(server)
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

    def _is_ready(self) -> bool:
        counts = self.mapping.counts()
        return bool(counts) and not counts[""] and len(counts) == len(self.servers)


def _arguments(link: Link, tie: Link, terms: Terms) -> Sequence[str]:
    return (
        *("--cluster", f"etcd://127.0.0.1:{tie.port}"),
        *("--advertise", f"{LockServer.host}:{link.port}"),
        *("--cluster-promise", str(terms.promise)),
        *("--cluster-max-lease-ttl", str(terms.max_lease)),
    )
