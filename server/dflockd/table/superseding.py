"""The newest wins: what an owner with an age does to older ones, and they to it.

Only requests with an age take part. An older one that asks or waits is refused. An older one that
holds the lock gets a message if it listens: when it releases, the next one has the lock as usual.
"""

from __future__ import annotations

import itertools
from functools import partial

from dflockd.table.limits import STEP
from dflockd.table.line import number_of
from dflockd.table.newest import Newest, NewestRecord
from dflockd.table.slots import Effect, Slots
from dflockd.table.state import Entry, Hold, Partition, Peer, Waiter
from dflockd.table.states import LISTENING
from dflockd.wire import Moved, Refusal, Space, Status, Superseded


def contend(
    slots: Slots,
    entry: Entry,
    age: int,
    label: bytes,
    resumed: Waiter | None,
    now: float,
    effects: list[Effect],
) -> Refusal | None:
    """Have a task with an age ask for a lock: refuse it, or the older ones.

    Args:
        slots: those of the table.
        entry: the entry of the lock.
        age: the age of the task that asks.
        label: the label of that task.
        resumed: the position that it takes up, if it does.
        now: the time.
        effects: what others are told.

    Returns:
        What to answer if it is refused.
    """
    partition, key = entry.partition, entry.key
    newest = partition.newest.get(key) or newest_there(slots, entry)
    if newest is not None and newest.age >= age:
        slots.newest.asked(newest)
        if newest.age == age:
            return None
        if resumed is not None:
            slots.oust(resumed, entry, newest.answer, effects)
            slots.promote(entry, now, effects)
        slots.counts.outdated += 1
        slots.remove_unused(entry)
        return newest.answer
    remember(slots, partition, NewestRecord(key, age, label))
    answer = Superseded(age, label)
    if not oust_older(slots, entry, answer, resumed, now, effects):
        slots.later(partial(oust_more, slots, entry), now)
    slots.put_back(entry)
    if entry.waiters is not None and entry.waiters.listener is not None:
        tell_listener(slots, entry.waiters.listener, answer, effects)
    return None


def oust_older(
    slots: Slots,
    entry: Entry,
    answer: Superseded,
    resumed: Waiter | None,
    now: float,
    effects: list[Effect],
) -> bool:
    """Refuse the waiters that are older, or some of them; say whether that was all."""
    # Those who came first stand first, so that nobody as new is before them.
    first = list(itertools.islice(entry.aged or (), STEP))
    older = [w for w in first if w.age < answer.age and w is not resumed]
    older.sort(key=number_of)
    for waiter in older:
        slots.oust(waiter, entry, answer, effects)
    if older and slots.is_here(entry):
        slots.promote(entry, now, effects)  # a slot may have been held for one of them
    return len(first) < STEP or not older


def oust_more(slots: Slots, entry: Entry, now: float, effects: list[Effect]) -> bool:
    """Go on with that, if there are more."""
    newest = entry.partition.newest.get(entry.key)
    if newest is None or not slots.is_here(entry):
        return True
    return oust_older(slots, entry, newest.answer, None, now, effects)


def newest_there(slots: Slots, entry: Entry) -> Newest | None:
    """Return the newest of those who hold a lock or wait for it, if the newest was forgotten."""
    # One alone holds a lock of which ages count, and each waiter is as old as the newest was.
    items: list[Hold | Waiter] = list(itertools.islice(entry.holds.values(), STEP))
    items.extend(itertools.islice(entry.aged or (), STEP))
    best = max(items, key=lambda item: item.age, default=None)
    if best is None or not best.age:
        return None
    remember(slots, entry.partition, NewestRecord(entry.key, best.age, best.label))
    return entry.partition.newest[entry.key]


def remember(slots: Slots, partition: Partition, record: NewestRecord) -> None:
    """Let somebody be the newest of a key."""
    changed = slots.newest.note(partition.newest, record)
    if slots.changes is not None:
        slots.changes += changed


# Holders that listen.


def listen(
    slots: Slots,
    partition: Partition,
    peer: Peer,
    key: bytes,
    token: bytes,
    now: float,
    effects: list[Effect],
) -> Refusal | None:
    """Tell the holder of a lock that a newer task wants it.

    Returns:
        What to answer; ``None`` if there is no answer yet.
    """
    hold = slots.find(partition, Space.LOCK, key, token)
    if hold is None:
        return Status.LEASE_EXPIRED
    if not hold.age:
        return Status.ERROR
    newer = partition.newer_than(key, hold.age)
    if newer is not None:
        slots.counts.asked_to_stop += 1
        return newer
    queue = hold.entry.queue()
    if queue.listener is not None:
        # Its process has lost the connection on which it did so.
        slots.answer_listener(queue.listener, Status.LEASE_EXPIRED, effects)
    waiter = Waiter(hold.entry, peer, -1, 0, now, two_phase=False, state=LISTENING)
    queue.listener = peer.waiting = waiter
    return None


def tell_listener(slots: Slots, waiter: Waiter, answer: Superseded, effects: list[Effect]) -> None:
    """Tell a holder that somebody newer has come."""
    slots.counts.asked_to_stop += 1
    slots.answer_listener(waiter, answer, effects)


# With its shard.


def refer_listener(slots: Slots, entry: Entry, reply: Refusal, effects: list[Effect]) -> None:
    """Send who listens to where the lock is now."""
    if entry.waiters is not None and entry.waiters.listener is not None:
        if isinstance(reply, Moved):
            reply = reply._replace(ticket=b"")
        slots.answer_listener(entry.waiters.listener, reply, effects)
