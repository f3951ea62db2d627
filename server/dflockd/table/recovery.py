"""What a table takes back: the holds that were kept of it, and those that only holders know of."""

from __future__ import annotations

from dflockd.table.deadlines import rounded
from dflockd.table.slots import Slots
from dflockd.table.state import UNKNOWN, Group, Hold, HoldRecord, Peer
from dflockd.wire import Release, Renew, Space, Status


class Recovery(Slots):
    """How holds come back."""

    def _restore(self, group: Group, kept: HoldRecord, left: float, now: float) -> None:
        """Take in a hold that has so many seconds left."""
        entry = group.spaces[kept.space].get(kept.key)
        if entry is None:
            entry = self._add(group, kept.space, kept.key, kept.limit)
        elif entry.limit == UNKNOWN:
            entry.limit = kept.limit
        token = self._issuer.token(kept.space, kept.key, kept.fence)
        hold = entry.holds[kept.fence] = Hold(entry, kept.fence, token, None, kept.since)
        hold.label = kept.label
        hold.detached = kept.detached
        self._deadlines.set(hold, rounded(left), now)  # a lease that ends late harms nobody
        group.issuer.fence = max(group.issuer.fence, kept.fence)
        self.counts.returned += 1
        self._note(hold)

    def _forgotten(self, group: Group, request: Renew | Release, now: float) -> int | None:
        """Return the fence of a hold that is authentic and was forgotten, while that may be."""
        if group.recovers_until is None or now >= group.recovers_until:
            return None
        fence = self._issuer.verify(request.space, request.key, request.token)
        return None if fence in group.ended else fence

    def _release_forgotten(self, group: Group, request: Release, now: float) -> Status:
        fence = self._forgotten(group, request, now)
        if fence is None:
            return Status.ERROR
        group.ended.add(fence)
        return Status.OK

    def _reclaim(self, group: Group, peer: Peer, request: Renew, lease: int, now: float) -> bool:
        """Bring back a hold that was forgotten here.

        Of two for one lock the later grant counts: the earlier one had ended before it.
        """
        fence = self._forgotten(group, request, now)
        if fence is None:
            return False
        is_lock = request.space is Space.LOCK
        entry = group.spaces[request.space].get(request.key)
        if entry is not None and is_lock:
            [other] = entry.holds.values()
            if other.fence > fence:
                return False
            self.counts.superseded += 1
            self._free(other, now, [])
            entry = None
        if entry is None:
            limit = 1 if is_lock else UNKNOWN
            entry = self._add(group, request.space, request.key, limit)
        hold = entry.holds[fence] = Hold(entry, fence, request.token, peer, now)
        peer.holds[hold] = None
        self._deadlines.set(hold, lease * self._stretch, now)
        group.issuer.fence = max(group.issuer.fence, fence)
        self.counts.returned += 1
        self._note(hold)
        return True
