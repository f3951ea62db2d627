"""What a table takes back: the holds that were kept of it, and those that only holders know of.

After a loss some records are missing and others are out of date. What they prove is that a hold was
granted; and if it was granted alone, that every earlier hold of its key had ended. Whether it lasts,
and for how long, is in doubt until its holder renews it or the recovery ends: by then all that was not
renewed has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dflockd.table import owners
from dflockd.table.deadlines import rounded
from dflockd.table.pauses import NEVER, PauseRecord
from dflockd.table.rates import PackedRecord, RateRecord
from dflockd.table.slots import Effect, Slots
from dflockd.table.state import UNKNOWN, Entry, Hold, HoldRecord, Partition, Peer
from dflockd.wire import FairGroup, Owner, Recovering, Space, Status


def restore(
    slots: Slots,
    partition: Partition,
    holds: Iterable[HoldRecord],
    now: float,
    rates: Iterable[RateRecord | PackedRecord] = (),
) -> None:
    """Take in what was kept of an earlier table; nobody owns it until it is renewed.

    Of two records of one key the later grant counts, if it was granted alone: the earlier hold had
    ended before it.
    """
    for record in rates:
        if isinstance(record, PackedRecord):
            slots.rates.restore_packed(partition.rates, record, now)
        else:
            slots.rates.restore(partition.rates, record, now)
    for kept in latest(holds):
        restore_hold(slots, partition, kept, kept.deadline - now, now)


def recover(slots: Slots, partition: Partition, until: float) -> None:
    """Grant nothing until then: holds may be missing, and those that are here be out of date.

    Their holders bring them back meanwhile by renewing them: that their tokens are authentic
    proves that they were granted. What was restored stays until then at least, for it may have
    been renewed for longer than is known.
    """
    partition.recovers_until = until
    for entries in partition.spaces:
        for entry in entries.values():
            for hold in entry.holds.values():
                partition.doubted.add(hold)
                if hold.deadline < until:
                    since = hold.deadline - hold.span
                    slots.deadlines.reset(hold, rounded(until - since), since)
                    slots.note(hold)


def restore_hold(
    slots: Slots, partition: Partition, kept: HoldRecord, left: float, now: float
) -> None:
    """Take in a hold that has so many seconds left."""
    entry = partition.spaces[kept.space].get(kept.key)
    if entry is None:
        entry = slots.add(partition, kept.space, kept.key, kept.limit, now)
    elif kept.limit != UNKNOWN and (
        entry.limit == UNKNOWN or kept.fence > max(entry.holds, default=0)
    ):
        entry.limit = kept.limit
    token = slots.issuer.token(kept.space, kept.key, kept.fence, is_sole=kept.limit == 1)
    owner = Owner(kept.owner, kept.attempt, kept.age) if kept.owner else None
    hold = Hold(*(entry, kept.fence, token, None, 0, kept.since), kept.limit, owner, kept.label)
    entry.holds[kept.fence] = hold
    hold.detached = kept.detached
    if kept.places and (rate := partition.rates.open.get((kept.space, kept.key))) is not None:
        rate.take(kept.fence, kept.places)
    if kept.group or kept.weight > 1:
        entry.grouped().restore(kept.fence, kept.group, kept.weight)
    owners.add(entry, hold)
    slots.deadlines.set(hold, rounded(left), now)  # a lease that ends late harms nobody
    # The next grant has a larger fence than all that are out, or a resource would refuse its writes.
    partition.issuer.fence = max(partition.issuer.fence, kept.fence)
    slots.counts.returned += 1
    slots.note(hold)


def restore_pause(slots: Slots, partition: Partition, kept: PauseRecord, now: float) -> None:
    """Take in a pause, which may be over by now; of one key the latest comes last."""
    if kept.until <= now:
        return
    entry = partition.spaces[Space.LOCK].get(kept.key)
    if entry is None:
        entry = slots.add(partition, Space.LOCK, kept.key, 1, now)
    left = kept.until - now
    slots.pause(entry, kept, left if left == NEVER else rounded(left), now)


def wait(partition: Partition, now: float) -> Recovering | None:
    """Return what to answer while there are no grants, and end that if its time is over."""
    until = partition.recovers_until
    # Of a key about which nothing is known, too: just its hold may be the one that is missing.
    if until is not None and now < until:
        return Recovering(math.ceil((until - now) * 1000))
    partition.end_recovery()
    return None


def doubt(partition: Partition, hold: Hold, now: float, *, confirm: bool) -> Recovering | None:
    """Return what to answer while nobody knows whether a hold lasts, and end the doubt if it does.

    Only a holder that has always renewed in time knows that, and says so with `Renew`. One that
    asks for confirmation (`How.CONFIRM`) does not.
    """
    until = partition.recovers_until
    if until is None or now >= until or hold not in partition.doubted:
        return None
    if confirm:
        return Recovering(math.ceil((until - now) * 1000))
    partition.doubted.discard(hold)
    return None


def forgotten(
    slots: Slots, partition: Partition, space: int, key: bytes, token: bytes, now: float
) -> tuple[int, bool] | None:
    """Return the fence of a hold that is authentic and was forgotten, while that may be.

    And whether it was granted as the only one.
    """
    if partition.recovers_until is None or now >= partition.recovers_until:
        return None
    verified = slots.issuer.verify(space, key, token)
    if verified is None or verified[0] in partition.ended:
        return None
    return None if verified[0] <= partition.last_ended.get((space, key), 0) else verified


def release_forgotten(
    slots: Slots,
    partition: Partition,
    space: int,
    key: bytes,
    token: bytes,
    now: float,
    effects: list[Effect],
) -> Status:
    """End a hold that was forgotten, and what is here of the key that had ended before it."""
    found = forgotten(slots, partition, space, key, token, now)
    if found is None:
        return Status.ERROR
    fence, is_sole = found
    partition.remember_end((space, key), fence, is_sole=is_sole)
    if is_sole:
        supersede(slots, partition.spaces[space].get(key), fence, now, effects)
    return Status.OK


def supersede(
    slots: Slots, entry: Entry | None, fence: int, now: float, effects: list[Effect]
) -> None:
    """End what is here of a key that was granted once more with that fence, to one alone."""
    for other in list(entry.holds.values()) if entry is not None else ():
        if other.fence < fence:
            slots.counts.superseded += 1
            slots.free(other, now, effects)


def reclaim(
    slots: Slots,
    partition: Partition,
    peer: Peer,
    space: int,
    key: bytes,
    token: bytes,
    lease: int,
    now: float,
    effects: list[Effect],
    owner: Owner | None,
    label: bytes,
    share: FairGroup | None,
) -> Hold | None:
    """Bring back a hold that was forgotten here, and return it.

    A grant to one alone says that all before it had ended.
    """
    found = forgotten(slots, partition, space, key, token, now)
    if found is None:
        return None
    fence, is_sole = found
    entry = partition.spaces[space].get(key)
    if entry is not None:
        # A later grant to one alone proves that this hold had ended before it.
        if any(other.is_sole and other.fence > fence for other in entry.holds.values()):
            return None
        if is_sole:
            supersede(slots, entry, fence, now, effects)
            entry = partition.spaces[space].get(key)
    limit = 1 if is_sole else UNKNOWN
    if entry is None:
        entry = slots.add(partition, space, key, limit, now)
    hold = Hold(entry, fence, token, peer, lease, now, limit, owner, label)
    entry.holds[fence] = hold
    owners.add(entry, hold)
    if share is not None:
        entry.grouped().begin(fence, share)
    peer.holds[hold] = None
    slots.deadlines.set(hold, lease * slots.stretch, now)
    partition.issuer.fence = max(partition.issuer.fence, fence)
    slots.counts.returned += 1
    slots.note(hold)
    return hold


def latest(holds: Iterable[HoldRecord]) -> list[HoldRecord]:
    """Return the records that count: of each key those since the last grant to one alone."""
    alone: dict[tuple[int, bytes], int] = {}
    found: dict[tuple[int, bytes, int], HoldRecord] = {}
    for kept in holds:
        name = kept.space, kept.key
        if kept.limit == 1 and kept.fence > alone.get(name, 0):
            alone[name] = kept.fence
        found[*name, kept.fence] = kept
    return [kept for kept in found.values() if kept.fence >= alone.get((kept.space, kept.key), 0)]
