"""What a run is like."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflockd.cluster import ClusterParameters
from tests.chaos.faults import FAULTS

HISTORY = "history.jsonl"
"""The name of the history in the directory of a run."""

CLUSTER_SERVING_LEASE = 2
CLUSTER_LEASE = 14
"""Seconds. Renewed at its half, a lease lasts until the shard of a killed server has another one."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times in seconds.

    Attributes:
        directory: where everything is written.
        seed: the schedule of the faults and what clients choose follow from it.
        seconds: how long the faults last.
        pace: mean time between two faults of one process or link.
        faults: the kinds that may happen.
        work: longest of the usual critical sections.
        long: share of sections that last about as long as a lease.
        aside: longest pause of a client's thread between two sections.
        rate: tasks sent in a second.
        state_dir: gives every server a state directory in it.
        server: the server's command after ``python -m``.
        heedless: whether clients ignore the ends of their leases.
        wait: where tasks wait for their locks, see `LockedTask.lock_wait`.
        serving_lease: that of the servers of a cluster; ``None`` if they are none.
        etcd: how many members their etcd has.
    """

    directory: Path
    seed: int
    seconds: float = 30
    servers: int = 1
    workers: int = 2
    clients: int = 4
    keys: int = 6
    lease: int = 3
    pace: float = 5
    faults: Sequence[str] = FAULTS
    work: float = 0.05
    long: float = 0.02
    aside: float = 0.3
    rate: float = 8
    state_dir: Path | None = None
    server: str = "dflockd"
    heedless: bool = False
    wait: str = "slot"
    serving_lease: int | None = None
    etcd: int = 1

    @property
    def parameters(self) -> ClusterParameters | None:
        """The parameters of the cluster, if it is one."""
        return (
            None
            if self.serving_lease is None
            else ClusterParameters(serving_lease=self.serving_lease, max_lease=self.lease)
        )


def of_users(*more: str) -> argparse.ArgumentParser:
    """Return what reads the command of a process of a run; `more` are arguments of its own."""
    parser = argparse.ArgumentParser()
    for name in ("seed", *more):
        parser.add_argument(f"--{name}", required=True)
    for name in ("keys", "lease"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("work", "long", "aside"):
        parser.add_argument(f"--{name}", type=float, required=True)
    return parser


SEVERAL, RATED, FAIR, NEWEST, ONCE = SORTS = ("several-", "rated-", "fair-", "newest-", "once-")
"""What names of keys begin with that more than one may hold, or that are held otherwise."""


def key_names(number: int) -> list[str]:
    """The keys that all users of the locks contend for, one at a time."""
    return [f"key-{index}" for index in range(number)]


def all_key_names(number: int) -> list[str]:
    """All keys, of whatever sort."""
    return [f"{sort}{key}" for key in key_names(number) for sort in ("", *SORTS)]
