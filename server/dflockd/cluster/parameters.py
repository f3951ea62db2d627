"""What all servers of a cluster have agreed upon: without it their waiting would prove nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from dflockd.shards import NUM_SHARDS
from dflockd.wire import read_json

SERVING_LEASE = 10
MAX_LEASE = 60

DRIFT = 0.01
"""How much faster or slower than true a server's clock may run, as a share."""

MARGIN = 1.0
"""Seconds added to a wait on account of everything else."""


_SETTINGS = {
    "num_shards": "the number of shards",
    "serving_lease": "--cluster-serving-lease",
    "max_lease": "--cluster-max-lease-ttl",
}


class ParametersError(ValueError):
    """A server was started with other parameters than the cluster has; the text is one line."""


@dataclass(frozen=True, slots=True)
class ClusterParameters:
    """The parameters; times in seconds."""

    num_shards: int = NUM_SHARDS
    serving_lease: int = SERVING_LEASE
    """For how long after its last sign of life a server may grant and renew."""
    max_lease: int = MAX_LEASE
    """Longest lease of a lock that somebody renews."""

    @property
    def grace(self) -> float:
        """How long a shard's new server waits, when the old one did not hand it over.

        The old one's last serving lease began before the claim, and the last lock that it granted
        within that ends no later than this, on a clock of this one's.
        """
        return (self.serving_lease + self.max_lease) * self.stretch + MARGIN

    @property
    def stretch(self) -> float:
        """What a time on another server's clock is multiplied with, to be as long on this one."""
        return 1 + 3 * DRIFT

    def dump(self) -> bytes:
        """Return them as the store keeps them."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    def check(self, kept: bytes) -> None:
        """Compare them with those of the cluster.

        Raises:
            ParametersError: they differ.
        """
        try:
            theirs = read_json(kept)
            ours = asdict(self)
            differing = [name for name, value in ours.items() if theirs[name] != value]
        except (ValueError, KeyError, TypeError):
            raise ParametersError(
                f"the parameters of the cluster cannot be read: {kept[:200]!r}"
            ) from None
        if differing:
            raise ParametersError(
                "; ".join(
                    f"{_SETTINGS[name]} is {ours[name]} here and {theirs[name]} in the cluster"
                    for name in differing
                )
            )
