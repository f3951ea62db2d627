"""Who holds a lock in a real cluster, with the protocol alone: wherever its shard goes."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from examples.demo.stage import wait_until
from tests.dflockd.cluster.stage import WAIT, ClusterServer, ClusterStage, FewShards
from tests.dflockd.raw_server import PATIENCE, RawClient, granted
from tests.dflockd.shards.etcd_process import Etcd
from tests.pace import Pace

SERVING_LEASE = 2
LEASE = 9
"""Long enough for a shard whose server has crashed to get another one meanwhile."""


def start_cluster(
    directory: Path, etcd: Etcd, kind: type[ClusterServer] = FewShards
) -> ClusterStage:
    """Three servers whose locks end after `LEASE`; they start with the block."""
    times = ("--default-lease-ttl", str(LEASE))
    return ClusterStage(
        directory, etcd, *times, serving_lease=SERVING_LEASE, max_lease=LEASE, kind=kind
    )


class Holder:
    """Who holds a lock, with the protocol alone: renews it, wherever its shard goes."""

    pace: Pace

    def __init__(self, cluster: ClusterStage, key: str) -> None:
        self._cluster = cluster
        self.key = key
        self.lease_ends(self._after(PATIENCE + LEASE))
        self._client: RawClient | None
        self._client, line = cluster.follow("l", key, f"0 {LEASE}")
        self.token = granted(line)
        assert self._client is not None
        host, port = self._client.sock.getpeername()
        self.server = cluster.at(f"{host}:{port}")
        self.keep()

    def _after(self, seconds: float = LEASE) -> tuple[float, float]:
        """A time, and how long this process will have been served then: that is later."""
        return time.monotonic() + seconds, self.pace.seconds + seconds

    def lease_ends(self, times: tuple[float, float] | None = None) -> None:
        self.deadline, self._served_until = times or self._after()

    def renew(self) -> str:
        """Ask once; the status of the answer, empty if there was none."""
        ends = self._after()
        status = self._ask("n", f"{self.token} {LEASE}")
        if status == "ok":
            self.lease_ends(ends)
        return status

    def _ask(self, command: str, argument: str) -> str:
        try:
            if self._client is None:
                self._client = self._cluster.connect(self.server)
            line = self._client.ask(command, self.key, argument)
        except OSError:
            line = ""
        status, *fields = line.split() or [""]
        if status == "error_moved":
            self.go_to(self._cluster.at(fields[2]))
        elif not status:
            self.go_to(self._cluster.any)
        return status

    def go_to(self, server: ClusterServer) -> None:
        """Ask there from now on."""
        self.server, self._client = server, None

    def keep(self) -> None:
        """Renew, and again until that is answered."""
        wait_until(lambda: self.try_to_keep() == "ok" or None, PATIENCE, lambda: self.key)

    def try_to_keep(self) -> str:
        """Renew; nothing must have come in between."""
        asked_at = time.monotonic()
        status = self.renew()
        if status == "error":
            assert asked_at >= self.deadline, f"{self.key} was lost"
        in_time = self.pace.seconds < self._served_until
        assert in_time, f"the lease of {self.key} has ended: {status!r}"
        if status == "error":
            pytest.skip("the machine is too slow to keep a lock")
        return status

    def release(self) -> str:
        """Release it, and again while its server is not ready, say so and no more; the status."""

        def probe() -> str | None:
            status = self._ask("r", self.token)
            return None if status in ("error_moved", "error_recovering") else status

        return wait_until(probe, PATIENCE, lambda: self.key)


def ask_at_once(cluster: ClusterStage, key: str, *, patience: float = WAIT) -> str:
    """The status of an attempt to get a lock without waiting for it; empty if nobody answered.

    On a busy machine a server may not be sure of its shards for a moment: then it is asked again.
    """
    return cluster.follow("l", key, f"0 {LEASE}", timeout=patience)[1].partition(" ")[0]


def fence(token: str) -> int:
    return int(token[:16], 16)


def wait_for_waiters(cluster: ClusterStage, server: ClusterServer, key: str, number: int) -> None:
    client = cluster.connect(server)

    def probe() -> bool | None:
        report = client.ask("i", key)
        return report.count('"waited_s"') == number or None

    wait_until(probe, PATIENCE, lambda: client.ask("i", key))


def asks_until_it_is_granted(client: RawClient, key: str) -> str:
    """Return the token of a lock whose shard is about to be served."""

    def probe() -> str | None:
        line = client.ask("l", key, f"0 {LEASE}")
        return granted(line) if line.startswith("ok") else None

    return wait_until(probe, PATIENCE, lambda: f"{key} is not granted")


def asks_until_it_is_refused(client: RawClient, key: str) -> float:
    """Return when a lock was last asked for that was granted; ``-inf`` if none was."""
    granted_at, until = -math.inf, time.monotonic() + PATIENCE
    while (asked_at := time.monotonic()) < until:
        line = client.ask("l", key, f"0 {LEASE}")
        if not line.startswith("ok"):
            assert line.startswith("error_recovering"), line
            return granted_at
        granted_at = asked_at
        assert client.ask("r", key, line.split()[1]) in ("ok", "error_recovering")
    raise AssertionError("it still grants")
