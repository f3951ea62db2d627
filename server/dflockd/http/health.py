"""Whether a server grants locks, and if not, why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from dflockd import clock
from dflockd.server import Server
from dflockd.shards.store import Size
from dflockd.wire import MapReport

MOVE_TIME = 2.0
"""Seconds that a shard may take from one server to another."""


class Check(NamedTuple):
    """One thing that must be so for a server to grant locks, and the state it is in."""

    name: str
    """A word or two with underscores: it becomes the label of a metric."""
    ok: bool
    reason: str
    """One line for people, whether it is so or not."""
    needed: bool = True
    """Whether the server is not ready without it."""


Probe: TypeAlias = Callable[[], Check]
"""Looks at one thing, at once: nobody waits for it."""


class ClusterHealth(Protocol):
    """What is seen of the cluster that a server is in: a `dflockd.cluster.Node`."""

    @property
    def address(self) -> str:
        """How the others know this server."""

    @property
    def joined(self) -> bool:
        """Whether it is in the cluster, and knows what the store has."""

    @property
    def leaving(self) -> bool:
        """Whether it hands its shards over, to stop."""

    @property
    def trouble(self) -> str:
        """Why no lock is granted, as far as it is known."""

    @property
    def store_size(self) -> Size | None:
        """How much room the store takes, where that is known."""

    def counts(self) -> Mapping[str, int]:
        """Return how many shards it has in which stage."""

    def unserved(self) -> Mapping[int, int]:
        """Return the shards assigned to it that no server serves, and their revisions."""

    def conditions(self) -> Mapping[str, int]:
        """Return how it stands with all shards of the cluster: how many are in which condition."""

    def report(self, now: float) -> MapReport:
        """Return which server has which shard."""


class Door(Protocol):
    """What is seen of the address that a server advertises: a `front_door.FrontDoor`."""

    @property
    def problem(self) -> str | None:
        """Why a connection does not reach it; empty if one does, ``None`` before the first."""


def probes_of(
    server: Server, cluster: ClusterHealth | None, door: Door | None = None
) -> list[Probe]:
    """Return what to look at."""
    probes: list[Probe] = [
        lambda: _listening(server),
        lambda: _not_draining(server, cluster),
        lambda: _not_recovering(server, cluster),
    ]
    if cluster is not None:
        shards = ShardProbe(cluster)
        probes += [
            lambda: _store_answers(server, cluster),
            lambda: _joined(cluster),
            lambda: shards.look(clock.now()),
        ]
    if door is not None:
        probes.append(lambda: _found(door))
    return probes


def look(probes: Sequence[Probe]) -> tuple[bool, list[Check]]:
    """Return whether all is well, and everything that was looked at."""
    checks = [probe() for probe in probes]
    return all(check.ok for check in checks if check.needed), checks


class ShardProbe:
    """Checks whether the shards that a server should serve are served.

    A shard on its way from one server to another is nobody's for some milliseconds, and in a large
    move there is always one. So a shard counts as missing once it has not moved for `MOVE_TIME`. A
    server that has only just joined must have all of its shards first.
    """

    def __init__(self, cluster: ClusterHealth) -> None:
        self._cluster = cluster
        self._since: dict[tuple[int, int], float] = {}
        self._has_had_all = False

    def look(self, now: float) -> Check:
        """Return how it stands with them."""
        unserved = self._cluster.unserved()
        self._since = {item: self._since.get(item, now) for item in unserved.items()}
        if not self._cluster.joined:
            self._has_had_all = False
        elif not unserved:
            self._has_had_all = True
        missing = sorted(
            shard
            for (shard, _), since in self._since.items()
            if not self._has_had_all or now - since >= MOVE_TIME
        )
        reason = "its shards are served"
        if missing:
            reason = (
                f"{len(missing)} of its shards are not served, the first of them {missing[0]}: "
                "etcd refuses to hand them over, or is slow"
            )
        return Check("shards_served", not missing, reason)


def _listening(server: Server) -> Check:
    where = ", ".join(server.addresses)
    return Check("listening", bool(where), f"on {where}" if where else "not listening")


def _not_draining(server: Server, cluster: ClusterHealth | None) -> Check:
    if server.draining:
        return Check("not_draining", False, "shutting down, waiting for holders")
    if cluster is not None and cluster.leaving:
        return Check("not_draining", False, "shutting down, handing its shards over")
    return Check("not_draining", True, "not draining")


def _not_recovering(server: Server, cluster: ClusterHealth | None) -> Check:
    now = clock.now()
    groups = list(server.table.each_partition())
    waits = [group.recovers_until - now for group in groups if group.recovers_until is not None]
    waits = [wait for wait in waits if wait > 0]
    reason = "nothing to recover"
    if waits:
        reason = (
            f"no grants for another {max(waits):.1f} s: holders that this server does not know get "
            "time to renew"
        )
    # In a cluster it is ready all the same: holders have to reach it, to keep what they hold, and
    # nobody else can do anything for those who wait.
    return Check("not_recovering", not waits or cluster is not None, reason)


def _joined(cluster: ClusterHealth) -> Check:
    if cluster.joined:
        return Check("joined", True, f"in the cluster as {cluster.address}")
    return Check("joined", False, f"not in the cluster as {cluster.address}: see the log")


def _found(door: Door) -> Check:
    # Readiness does not go by it: what waits for readiness may be what is in the way.
    if door.problem is None:
        return Check("advertised", False, "not checked yet whether --advertise leads here", False)
    reason = "a connection to --advertise leads here"
    if door.problem:
        reason = f"--advertise does not lead here: {door.problem}"
    return Check("advertised", not door.problem, reason, False)


def _store_answers(server: Server, cluster: ClusterHealth) -> Check:
    ok = server.table.status(clock.now()) not in ("cut off", "closed")
    reason = "the store answers"
    if not ok:
        reason = f"{cluster.trouble or 'no answer from the store'}: no lock is granted or renewed"
    return Check("store_answers", ok, reason)
