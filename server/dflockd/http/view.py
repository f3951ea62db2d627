"""What is shown of the table: which keys, who holds them and who waits, as plain data and as JSON.

The table belongs to the event loop, and so does the time that it takes to look through it. So what can
be long is a generator: a search of a hundred thousand keys, a long answer. Between two of its steps the
server does its work (`dflockd.server.slices`).
"""

from __future__ import annotations

import itertools
import json
from bisect import insort
from collections.abc import Generator, Iterable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from dflockd import clock
from dflockd.ranking import SORTS, Rank, Ranked
from dflockd.table import Entry, Hold, LockTable, Waiter, report
from dflockd.table.finding import Match, Walk, as_wanted
from dflockd.table.rates import KeyRate
from dflockd.wire import Space

STEP = 16
"""Keys, holders or waiters of one step."""

MAX_LISTED = 1000
"""Holders or waiters that are listed of one key."""

Json: TypeAlias = dict[str, Any]

SPACES = {"lock": Space.LOCK, "semaphore": Space.SEMAPHORE}

_rank = itemgetter(0)


class Found(NamedTuple):
    """A key that was found, and who there has the text in the label: the first of so many."""

    entry: Entry
    match: Match
    matches: int


def search(
    table: LockTable, text: str, sort: str, most: int, *, notes: bool = False
) -> Generator[None, None, tuple[list[Found], int, int]]:
    """Find keys that have a text in themselves or in the label of a holder or waiter.

    Args:
        table: where.
        text: what; upper and lower case of ASCII letters are the same.
        sort: one of `SORTS`.
        most: how many are returned.
        notes: whether keys of notes are wanted too; see `dflockd.wire.notes`.

    Returns:
        The first of them, how many there are, and how many notes were left out. Some may have ended
        since they were found.
    """
    rank, now = SORTS[sort], clock.now()
    best: list[tuple[Rank, Found]] = []
    found = 0
    walk = Walk(table.each_partition(), as_wanted(text), people=False, notes=notes)
    last: Found | None = None

    def add(listed: Found) -> None:
        ranked = rank(_ranked(listed.entry, now))
        if len(best) < most or ranked < best[-1][0]:
            insort(best, (ranked, listed), key=_rank)
            del best[most:]

    while not walk.is_done:
        for match in walk.step():
            if last is not None and match.entry is last.entry:
                last = last._replace(matches=last.matches + 1)
                continue
            if last is not None:
                add(last)
            found += 1
            last = Found(match.entry, match, 1)
        yield
    if last is not None:
        add(last)
    return [listed for _, listed in best], found, walk.left_out


def rows(found: Iterable[Found], now: float) -> Generator[None, None, str]:
    """Return the JSON of a list of keys, in a few words each; times in seconds."""
    return _listed(_row(each, now) for each in found if each.entry.is_used)


def detail(
    space: Space, key: bytes, entry: Entry | None, rate: KeyRate | None, now: float
) -> Generator[None, None, str]:
    """Return the JSON of all there is to say of a key; times in seconds.

    Without an entry nobody holds it or waits for it. Of more than `MAX_LISTED` holders or waiters
    the last are left out and counted as ``omitted_...``.
    """
    holds = entry.holds.values() if entry is not None else ()
    waiters = (entry.waiters or ()) if entry is not None else ()
    shown = {
        "key": key.decode(errors="replace"),
        "space": space.name.lower(),
        **report.of_key(entry, rate, now),
        "omitted_holders": max(0, len(holds) - MAX_LISTED),
        "omitted_waiters": max(0, len(waiters) - MAX_LISTED),
    }
    # As of now, before others have their turns.
    first_holds = list(itertools.islice(holds, MAX_LISTED))
    first_waiters = list(itertools.islice(waiters, MAX_LISTED))
    holders = yield from _listed(_holder(hold, now) for hold in first_holds)
    waiting = yield from _listed(_waiter(waiter, now) for waiter in first_waiters)
    return f'{json.dumps(shown)[:-1]}, "holders": {holders}, "waiters": {waiting}}}'


def _listed(things: Iterator[Json]) -> Generator[None, None, str]:
    """Return the JSON of a list."""
    parts = []
    while part := list(itertools.islice(things, STEP)):
        parts.append(json.dumps(part)[1:-1])
        yield
    return f"[{', '.join(parts)}]"


def _row(listed: Found, now: float) -> Json:
    entry, match = listed.entry, listed.match
    hold = _first(entry)
    waiter = _longest(entry)
    return {
        "key": entry.key.decode(),
        "space": Space(entry.space).name.lower(),
        **report.of_key(entry, entry.rate, now),
        "holders": len(entry.holds),
        "waiters": len(entry.waiters or ()),
        "told": len(entry.waiters.told) if entry.waiters is not None else 0,
        "oldest_wait_s": round(now - waiter.since, 3) if waiter is not None else None,
        "holder": _holder(hold, now) if hold is not None else None,
        "match": _match(match, now) if match.item is not None else None,
        "matches": listed.matches if match.item is not None else 0,
    }


def _match(match: Match, now: float) -> Json:
    """Return who was looked for and found."""
    item = match.item
    if isinstance(item, Waiter):
        return {"position": match.position, **_waiter(item, now)}
    assert item is not None
    return {"position": 0, **_holder(item, now)}


def _holder(hold: Hold, now: float) -> Json:
    newer, group = report.newer(hold), hold.group.decode()
    by = newer.get("superseded_by")
    return {
        **newer,
        "group": group,
        **(weight := report.weight(hold.weight)),
        "details": [
            *_in_group(group),
            *_of_weight(weight),
            *([f"superseded by {by}"] if by else []),
        ],
        "label": hold.label.decode(),
        **report.owner(hold),
        # Text: JavaScript, and much that reads JSON, has no integers of 64 bits.
        "fence": str(hold.fence),
        "connection": hold.peer.id if hold.peer is not None else None,
        "detached": hold.detached,
        "held_s": round(now - hold.since, 3),
        "lease_s": report.lease(hold),
        "lease_left_s": round(hold.deadline - now, 3),
    }


def _waiter(waiter: Waiter, now: float) -> Json:
    group = "" if waiter.group is None else waiter.group.name.decode()
    return {
        "group": group,
        **(weight := report.weight(waiter.weight)),
        "details": [*_in_group(group), *_of_weight(weight)],
        "label": waiter.label.decode(),
        **report.owner(waiter),
        "connection": waiter.peer.id or None,
        "waited_s": round(now - waiter.since, 3),
        "away": waiter.is_away,
        "told": waiter.is_told,
    }


def _in_group(group: str) -> list[str]:
    return [f"group {group}"] if group else []


def _of_weight(weight: Json) -> list[str]:
    return [f"weight {weight['weight']}"] if weight else []


def _first(entry: Entry) -> Hold | None:
    return next(iter(entry.holds.values()), None)


def _longest(entry: Entry) -> Waiter | None:
    """Return who has waited longest, wherever in the queue that is."""
    return entry.waiters.oldest() if entry.waiters is not None else None


def _ranked(entry: Entry, now: float) -> Ranked:
    hold, waiter = _first(entry), _longest(entry)
    return Ranked(
        entry.key,
        entry.space == Space.SEMAPHORE,
        len(entry.waiters or ()),
        now - hold.since if hold is not None else 0.0,
        now - waiter.since if waiter is not None else 0.0,
    )
