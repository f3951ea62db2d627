"""Until when servers that had a shard before may still serve it, for all that one server has seen."""

from __future__ import annotations


class Promises:
    """When the promises of other servers can have been made at the latest.

    A shard's former server made its last promise with its last sign of life. All servers before that
    one made theirs before it claimed the shard: each claim finds the entry of its predecessor gone.
    So the later of these two moments holds for the whole chain, however many there were and whether
    or not this server was there to see them. What happened before everything was loaded counts as
    if it had happened then.

    Times are those of this server's clock, and of when something came in: never before it happened.
    """

    def __init__(self, num_shards: int) -> None:
        self._loaded_at = 0.0
        self._told = 0
        self._heard: dict[str, float] = {}
        self._epochs = [-1] * num_shards
        self._claimed = [0.0] * num_shards

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

    def latest(self, server: str, claimed: float, revision: int) -> float | None:
        """Return by when all promises had been made under which a shard was served.

        Args:
            server: the one that had the shard, until somebody else claimed it.
            claimed: when its own claim was first known.
            revision: of the store when it was succeeded.

        Returns:
            ``None`` while some of its signs of life may still be on their way.
        """
        if revision > self._told:
            return None
        return max(self._heard.get(server, self._loaded_at), claimed)
