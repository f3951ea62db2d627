"""Whether a server grants locks, and if not, why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from dflockd.server import Server
from dflockd.wire import MapReport


class Check(NamedTuple):
    """One thing that must be so for a server to grant locks, and the state it is in."""

    name: str
    """A word or two with underscores: it becomes the label of a metric."""
    ok: bool
    reason: str
    """One line for people, whether it is so or not."""


Probe: TypeAlias = Callable[[], Check]
"""Looks at one thing, at once: nobody waits for it."""


class Cluster(Protocol):
    """What is seen of the cluster that a server is in: a `dflockd.cluster.Node`."""

    @property
    def address(self) -> str:
        """How the others know this server."""

    @property
    def leaving(self) -> bool:
        """Whether it hands its shards over, to stop."""

    def may_serve(self, now: float) -> bool:
        """Whether the store has answered lately, so that locks are granted."""

    def counts(self) -> Mapping[str, int]:
        """Return how many shards it has in which stage."""

    def report(self, now: float) -> MapReport:
        """Return which server has which shard."""


def probes_of(server: Server, cluster: Cluster | None) -> list[Probe]:
    """Return what is to be looked at."""
    probes: list[Probe] = [
        lambda: _listening(server),
        lambda: _not_draining(server, cluster),
        lambda: _not_recovering(server),
    ]
    if cluster is not None:
        probes.append(lambda: _store_answers(cluster))
    return probes


def look(probes: Sequence[Probe]) -> tuple[bool, list[Check]]:
    """Return whether all is well, and everything that was looked at."""
    checks = [probe() for probe in probes]
    return all(check.ok for check in checks), checks


def _listening(server: Server) -> Check:
    where = ", ".join(server.addresses)
    return Check("listening", bool(where), f"on {where}" if where else "not listening")


def _not_draining(server: Server, cluster: Cluster | None) -> Check:
    if server.draining:
        return Check("not_draining", False, "told to stop, it waits for holders")
    if cluster is not None and cluster.leaving:
        return Check("not_draining", False, "told to stop, it hands its shards over")
    return Check("not_draining", True, "not draining")


def _not_recovering(server: Server) -> Check:
    now = time.monotonic()
    groups = list(server.table.each_group())
    waits = [group.recovers_until - now for group in groups if group.recovers_until is not None]
    waits = [wait for wait in waits if wait > 0]
    reason = "nothing to recover"
    if waits:
        reason = (
            f"no grants for another {max(waits):.1f} s: locks may be held that were forgotten here, "
            "and their holders can bring them back"
        )
    # Some of its shards recover in the ordinary course of a cluster, while it serves the others.
    return Check("not_recovering", len(waits) < len(groups) or not groups, reason)


def _store_answers(cluster: Cluster) -> Check:
    ok = cluster.may_serve(time.monotonic())
    reason = "the store answers" if ok else "no word from the store: no lock is granted or renewed"
    return Check("store_answers", ok, reason)
