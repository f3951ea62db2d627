"""What is shown of the table: which keys, who holds them and who waits, as plain data.

The table belongs to the event loop, and so does the time that it takes to look through it: a search
goes over a hundred thousand keys in slices, and between them the server does its work.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

from dflockd.table import Entry, Hold, LockTable, Waiter
from dflockd.wire import Space

SLICE = 200
"""Keys that a search looks at in one turn of the event loop: less than a millisecond."""

MAX_LISTED = 1000
"""Holders or waiters that are listed of one key."""

Json: TypeAlias = dict[str, Any]

Rank: TypeAlias = tuple[Any, ...]

SORTS: dict[str, Callable[[Entry], Rank]] = {
    "waiters": lambda entry: (-len(entry.waiters or ()), _since(entry), entry.key, entry.space),
    "age": lambda entry: (_since(entry), entry.key, entry.space),
    "key": lambda entry: (entry.key, entry.space),
}
"""In what order keys can be listed: the longest queue, the oldest holder, or their names first."""

SPACES = {"lock": Space.LOCK, "semaphore": Space.SEMAPHORE}


async def search(table: LockTable, text: str, sort: str, most: int) -> tuple[list[Entry], int]:
    """Find keys that contain a text, in themselves or in the label of who has held them longest.

    Args:
        table: where.
        text: what; upper and lower case of ASCII letters are the same.
        sort: one of `SORTS`.
        most: how many are returned.

    Returns:
        The first of them, and how many there are. Some may have ended since they were found.
    """
    wanted, rank = text.lower().encode(), SORTS[sort]
    best: list[tuple[Rank, Entry]] = []
    found = 0
    # As of now: while others have their turns, the table changes.
    groups = table.each_group()
    everything = [e for group in groups for space in group.spaces for e in space.values()]
    for start in range(0, len(everything), SLICE):
        if start:
            await asyncio.sleep(0)
        matching = [entry for entry in everything[start : start + SLICE] if _has(entry, wanted)]
        found += len(matching)
        ranked = [(rank(entry), entry) for entry in matching]
        best = heapq.nsmallest(most, itertools.chain(best, ranked), key=_rank)
    return [entry for _, entry in best], found


def row(entry: Entry, now: float) -> Json:
    """Return a key in a few words; times in seconds."""
    hold = _first(entry)
    return {
        "key": entry.key.decode(),
        "space": entry.space.name.lower(),
        "limit": entry.limit or None,
        "holders": len(entry.holds),
        "waiters": len(entry.waiters or ()),
        "holder": _holder(hold, now) if hold is not None else None,
    }


def detail(space: Space, key: bytes, entry: Entry | None, now: float) -> Json:
    """Return all there is to say of a key; times in seconds.

    Without an entry nobody holds it or waits for it. Of more than `MAX_LISTED` holders or waiters
    the last are left out and counted as ``omitted_...``.
    """
    holds = entry.holds.values() if entry is not None else ()
    waiters = (entry.waiters or ()) if entry is not None else ()
    return {
        "key": key.decode(),
        "space": space.name.lower(),
        "limit": (entry.limit or None) if entry is not None else None,
        "holders": [_holder(hold, now) for hold in itertools.islice(holds, MAX_LISTED)],
        "waiters": [_waiter(waiter, now) for waiter in itertools.islice(waiters, MAX_LISTED)],
        "omitted_holders": max(0, len(holds) - MAX_LISTED),
        "omitted_waiters": max(0, len(waiters) - MAX_LISTED),
    }


def _holder(hold: Hold, now: float) -> Json:
    return {
        "label": hold.label.decode(),
        # Text: JavaScript, and much that reads JSON, has no integers of 64 bits.
        "fence": str(hold.fence),
        "connection": hold.peer.id if hold.peer is not None else None,
        "detached": hold.detached,
        "held_s": round(now - hold.since, 3),
        "lease_s": round(hold.span, 3),
        "lease_left_s": round(hold.deadline - now, 3),
    }


def _waiter(waiter: Waiter, now: float) -> Json:
    return {
        "label": waiter.peer.label.decode(),
        "connection": waiter.peer.id or None,
        "waited_s": round(now - waiter.since, 3),
    }


def _first(entry: Entry) -> Hold | None:
    return next(iter(entry.holds.values()), None)


def _since(entry: Entry) -> float:
    hold = _first(entry)
    if hold is not None:
        return hold.since
    waiter = next(iter(entry.waiters or ()), None)
    return waiter.since if waiter is not None else 0.0


def _has(entry: Entry, wanted: bytes) -> bool:
    if not wanted or wanted in entry.key.lower():
        return True
    hold = _first(entry)
    return hold is not None and wanted in hold.label.lower()


def _rank(item: tuple[Rank, Entry]) -> Rank:
    return item[0]
