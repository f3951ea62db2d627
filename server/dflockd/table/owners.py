"""Owners: of the attempts of one owner, only the latest counts at a key.

An owner is one run of something that may be sent twice. A later attempt queues behind its
predecessor. An earlier one, or the same again, is answered at once. Compared are attached holds of
the key, and live waiters for it.

Ages are noted here as well: of all who are in the queue, also of those who are away.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TypeAlias

from dflockd.table.state import Entry, Hold, Waiter

Item: TypeAlias = Hold | Waiter


def _rank(item: Item) -> tuple[int, bool, int]:
    """Of one attempt what is held goes before what waits, and of two waiters the later."""
    assert item.owner is not None
    if isinstance(item, Hold):
        return item.owner.attempt, True, item.fence
    return item.owner.attempt, False, item.number


def add(entry: Entry, item: Item) -> None:
    """Note a hold or a waiter of an entry, if it has an owner."""
    if item.owner is None:
        return
    if entry.owners is None:
        entry.owners = {}
    items = entry.owners.get(item.owner.id)
    if items is None:
        entry.owners[item.owner.id] = [item]
    else:
        insort(items, item, key=_rank)
    if item.owner.age and isinstance(item, Waiter):
        add_age(entry, item)


def add_age(entry: Entry, waiter: Waiter) -> None:
    """Note that somebody in the queue of an entry has an age."""
    if entry.aged is None:
        entry.aged = {}
    entry.aged[waiter] = None


def discard(entry: Entry, item: Item) -> None:
    """Take out a hold or a waiter that has an owner or an age, if it was noted."""
    if entry.aged is not None and isinstance(item, Waiter):
        entry.aged.pop(item, None)
    if item.owner is None or entry.owners is None:
        return
    items = entry.owners.get(item.owner.id)
    if items is None:
        return
    index = bisect_left(items, _rank(item), key=_rank) if len(items) > 1 else 0
    if index < len(items) and items[index] is item:
        del items[index]
    if not items:
        del entry.owners[item.owner.id]


def latest(entry: Entry, owner: bytes) -> Item | None:
    """Return what an owner has at an entry, the highest attempt of it."""
    items = entry.owners.get(owner) if entry.owners is not None else None
    return items[-1] if items else None
