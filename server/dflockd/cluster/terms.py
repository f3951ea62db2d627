"""What all servers of a cluster have agreed upon: without it their waiting would prove nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from dflockd.shards import NUM_SHARDS

PROMISE = 10
MAX_LEASE = 60

DRIFT = 0.01
"""How much faster or slower than true a server's clock may run, as a share."""

MARGIN = 1.0
"""Seconds added to a wait on account of everything else."""


class TermsError(ValueError):
    """A server was started with other terms than the cluster has; the text is one line."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms; times in seconds."""

    num_shards: int = NUM_SHARDS
    promise: int = PROMISE
    """For how long after its last sign of life a server may grant and renew."""
    max_lease: int = MAX_LEASE
    """Longest lease of a lock that somebody renews."""

    @property
    def grace(self) -> float:
        """How long a shard's new server waits, when the old one did not hand it over.

        The old one's last promise was made before the claim, and the last lease that it granted on
        the strength of it ends no later than this, on a clock of this one's.
        """
        return (self.promise + self.max_lease) * self.stretch + MARGIN

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
            TermsError: they differ.
        """
        try:
            theirs = json.loads(kept)
            differing = [name for name, value in asdict(self).items() if theirs[name] != value]
        except (ValueError, KeyError, TypeError):
            raise TermsError(f"the terms of the cluster cannot be read: {kept[:200]!r}") from None
        if differing:
            raise TermsError(
                "; ".join(
                    f"{name} is {getattr(self, name)} here and {theirs[name]} in the cluster"
                    for name in differing
                )
            )
