"""Whether a store is still the one that it was, by what its answers say."""

from __future__ import annotations

from dflockd.shards.errors import StoreReplacedError


class Continuity:
    """Notices that a store was wiped, or set back to an earlier state.

    A store's revision only ever grows, and each answer contains every change that was acknowledged
    before. So no answer carries a revision lower than one that was known when its request was sent.
    Nor does another cluster of etcd have the identity of the one that was asked first.

    After that nothing is asked any more: what was known of the store is worth nothing.

    Attributes:
        revision: the highest that was seen.
    """

    def __init__(self) -> None:
        self.revision = 0
        self._cluster = 0
        self._broken: str | None = None

    def asks(self) -> int:
        """Note that a request is sent now; return what to pass to `answered`.

        Raises:
            StoreReplacedError: the store has been seen to be another one.
        """
        if self._broken is not None:
            raise StoreReplacedError(self._broken)
        return self.revision

    def answered(self, asked: int, revision: int, *, name: str, cluster: int = 0) -> None:
        """Look at an answer.

        Args:
            asked: what `asks` returned when the request was sent.
            revision: that of the answer; 0 if it need not be the latest.
            name: the address of the store that answered.
            cluster: the identity of the store, if it has one.

        Raises:
            StoreReplacedError: the store is another one than it was.
        """
        if self._broken is None and 0 < revision < asked:
            self._broken = f"{name} is at revision {revision} and was at {asked}"
        if self._broken is None and cluster and cluster != (self._cluster or cluster):
            self._broken = (
                f"{name} is of cluster {cluster:x}, and {self._cluster:x} answered before"
            )
        if self._broken is not None:
            raise StoreReplacedError(self._broken)
        self.revision = max(self.revision, revision)
        self._cluster = self._cluster or cluster

    def told(self, revision: int) -> None:
        """Take note that a watch has told of a change: what is asked from now on contains it."""
        self.revision = max(self.revision, revision)

    def begin_anew(self) -> None:
        """Take the store as it is now."""
        self.revision, self._cluster, self._broken = 0, 0, None
