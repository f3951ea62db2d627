"""Until when servers may serve: this one, and for all that it has seen the others.

Three kinds of moments, all on this server's clock, and the rules that follow from them:

- this server *sent* a transaction that found its entry: from then on it may serve for so long;
- this server *heard* another one: that one may serve for so long after it at the latest;
- this server saw a *claim*: all servers that had the shard before had ended their lives by then.
"""

from __future__ import annotations

import math

from dflockd.cluster.parameters import ClusterParameters

MOMENT = 5.0
"""Seconds that a server takes to tell others what it knows of a store that was replaced."""


class ServingLeases:
    """Keeps the moments, and says when a serving lease ends.

    A shard's former server began its last serving lease with its last sign of life. All servers before
    that one began theirs before it claimed the shard: each claim finds the entry of its predecessor
    gone. So the later of these two moments holds for the whole chain, however many there were and
    whether or not this server was there to see them. What happened before everything was loaded
    counts as if it had happened then.

    What others did is dated when it came in: never before it happened.

    Attributes:
        until: when this server's own lease ends.
        over_at: when all locks have ended that any server granted before the store was replaced;
            ``None`` while it is the one that it was.
    """

    def __init__(self, parameters: ClusterParameters) -> None:
        self._parameters = parameters
        self.until = 0.0
        self.over_at: float | None = None
        self._loaded_at = 0.0
        self._told = 0
        self._heard: dict[str, float] = {}
        self._epochs = [-1] * parameters.num_shards
        self._claimed = [0.0] * parameters.num_shards

    # This server.

    def extend(self, sent: float) -> None:
        """Take note that a transaction that was sent then has found this server's entry.

        From before it was sent: a server that finds the entry gone does so after it was carried
        out.
        """
        self.until = max(self.until, sent + self._parameters.serving_lease)

    def lasts(self, now: float) -> bool:
        """Whether this server may serve."""
        return now < self.until and self.over_at is None

    def end(self, now: float) -> float:
        """Stop serving: the store was replaced. Return for how long no other server may start.

        No server has begun a lease since.

        One that has not been in touch with the store for long has no locks left to wait for, and the
        store may have been replaced long ago.
        """
        wait = self.grace if now < self.hopeless_at else MOMENT
        self.over_at = now + wait
        return wait

    @property
    def hopeless_at(self) -> float:
        """When all locks that were held here have ended, unless the lease is extended."""
        return self.until + self._parameters.max_lease * self._parameters.stretch

    # The others.

    def loaded(self, revision: int, now: float) -> None:
        """Take note that all there was at a revision has come in, perhaps not all from before."""
        self._loaded_at = now
        self._heard.clear()
        self._told = revision

    def told(self, revision: int) -> None:
        """Take note that all changes up to a revision have come in."""
        self._told = revision

    def heard(self, server: str, now: float) -> None:
        """Take note of a sign of life."""
        self._heard[server] = now

    def claimed(self, shard: int, epoch: int, now: float) -> float:
        """Take note of the latest claim of a shard; return when it was first known."""
        if self._epochs[shard] != epoch:
            self._epochs[shard], self._claimed[shard] = epoch, now
        return self._claimed[shard]

    def silent_at(self, server: str, claimed: float, revision: int) -> float:
        """Return from when on nobody serves a shard any more that `server` has had.

        Args:
            server: the one that had the shard, until somebody else claimed it.
            claimed: when its own claim was first known.
            revision: the revision of the store when it was succeeded.

        Returns:
            ``inf`` while some of its signs of life may still be on their way.
        """
        if revision > self._told:
            return math.inf
        return max(self._heard.get(server, self._loaded_at), claimed) + self.silence

    @property
    def silence(self) -> float:
        """Seconds after which a sign of life of another server has lost its force."""
        return self._parameters.serving_lease * self._parameters.stretch

    @property
    def grace(self) -> float:
        """Seconds after a claim until all locks that others granted have ended."""
        return self._parameters.grace
