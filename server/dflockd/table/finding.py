"""Looking for somebody in the table: keys, holders and waiters with a text in them.

The table belongs to the event loop, and so does the time that it takes to look through it. So it is
done in steps, and between them the table changes: what has ended since may still be found, and what
is new may not.
"""

from __future__ import annotations

import itertools
import json
from bisect import insort
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Final, NamedTuple, final

from dflockd.table import report
from dflockd.table.state import Entry, Hold, Partition, Waiter
from dflockd.table.states import GONE, UNTOLD
from dflockd.wire.notes import is_note

STEP: Final = 16
"""Keys, holders and waiters that are looked at in one step."""

MOST_FOUND: Final = 200
"""Of what was found so many are told; all are counted."""


class Match(NamedTuple):
    """A key that has the text in itself, or somebody there who has it in the label.

    Attributes:
        entry: the key.
        item: the holder or waiter; ``None`` for the key itself.
        position: the position of a waiter, from 1.
        places: how many places of the rate the waiters up to it need; see `report.rate_wait`.
    """

    entry: Entry
    item: Hold | Waiter | None
    position: int
    places: int = 0


def as_wanted(text: str) -> bytes:
    """Return what is looked for: upper and lower case of ASCII letters are the same."""
    return text.lower().encode(errors="replace")


@final
class Walk:
    """Goes through a table, a few items at a time.

    Args:
        partitions: the table.
        wanted: from `as_wanted`; an empty one matches everything.
        people: whether holders and waiters are wanted also of a key that has the text itself.
        notes: whether keys of notes are, see `dflockd.wire.notes`.
    """

    def __init__(
        self, partitions: Iterable[Partition], wanted: bytes, *, people: bool, notes: bool
    ) -> None:
        self._wanted = wanted
        self._people = people
        self._notes = notes
        # As of now: while others have their turns, the table changes. To copy references is quick.
        self._entries: list[Entry] = []
        for partition in partitions:
            for space in partition.spaces:
                if space:
                    self._entries.extend(space.values())
        # The oldest first: mostly they are what is looked for.
        self._entries.reverse()
        self._entry: Entry | None = None
        self._items: Iterator[Hold | Waiter] = iter(())
        """Those of that entry that are still to be looked at."""
        self.is_done = False
        """Whether nothing is left."""
        self._position = self._places = 0
        self.left_out = 0
        """Keys of notes that were not looked at."""

    def step(self) -> list[Match]:
        """Look at the next few, and return who of them matches."""
        found: list[Match] = []
        for _ in range(STEP):
            item = next(self._items, None)
            if item is not None:
                self._look_at(item, found)
            elif self._entries:
                self._open(self._entries.pop(), found)
            else:
                self.is_done = True
                break
        return found

    def _open(self, entry: Entry, found: list[Match]) -> None:
        if not self._notes and is_note(entry.key):
            self.left_out += 1
            return
        if not self._wanted or self._wanted in entry.key.lower():
            found.append(Match(entry, None, 0))
            if not self._people:
                return
        self._entry, self._position, self._places = entry, 0, 0
        # As of now: it may be gone, or another, by the next step.
        self._items = itertools.chain(list(entry.holds.values()), entry.waiters or ())

    def _look_at(self, item: Hold | Waiter, found: list[Match]) -> None:
        assert self._entry is not None
        if isinstance(item, Waiter):
            self._position += 1
            self._places = report.places_up_to(self._places, item)
        if not self._wanted or self._wanted in item.label.lower():
            found.append(Match(self._entry, item, self._position, self._places))


@final
class Search:
    """Finds the first matches: the longest waiters, then the longest holders, then keys.

    Args:
        partitions: the table.
        text: what is looked for, in keys and in labels; an empty one finds everybody.
        waiters: whether nobody but waiters is wanted.
        notes: whether notes are wanted as well.
    """

    def __init__(
        self,
        partitions: Iterable[Partition],
        text: str,
        *,
        waiters: bool = False,
        notes: bool = False,
    ) -> None:
        self._walk = Walk(partitions, as_wanted(text), people=True, notes=notes)
        self._waiters = waiters
        self._best: list[tuple[tuple[int, float], Match]] = []
        """The first of them, with what they are ordered by."""
        self._texts: list[str] = []
        self._told = 0
        self.matched = 0
        """How many match, as far as has been looked."""

    def step(self, now: float) -> bool:
        """Go on for a moment; return whether that was the last of it."""
        if not self._walk.is_done:
            for match in self._walk.step():
                self._take(match)
            return False
        for _, match in self._best[self._told : self._told + STEP]:
            self._told += 1
            if _is_there(match):
                self._texts.append(json.dumps(told(match, now), ensure_ascii=False))
        return self._told >= len(self._best)

    def text(self) -> bytes:
        """Return what was found as JSON, after the last step."""
        return f'{{"matched": {self.matched}, "found": [{", ".join(self._texts)}]}}'.encode()

    def _take(self, match: Match) -> None:
        item = match.item
        if self._waiters and not isinstance(item, Waiter):
            return
        self.matched += 1
        rank = (2, 0.0) if item is None else (int(isinstance(item, Hold)), item.since)
        if len(self._best) < MOST_FOUND or rank < self._best[-1][0]:
            insort(self._best, (rank, match), key=itemgetter(0))
            del self._best[MOST_FOUND:]


def told(match: Match, now: float) -> dict[str, object]:
    """Return what there is to say of a match; times in seconds."""
    entry, item = match.entry, match.item
    hold = next(iter(entry.holds.values()), None)
    said: dict[str, object] = {
        "key": entry.key.decode(),
        "space": "lock" if entry.space == 0 else "semaphore",
        "limit": entry.limit,
        "holders": len(entry.holds),
        **report.used(entry),
        "waiters": len(entry.waiters) if entry.waiters is not None else 0,
        "holder": None if hold is None else report.holder(hold, now),
        "waiter": None,
        "position": match.position,
        "rate": report.rate(entry.rate, now),
        "pace_s": report.pace(entry, now),
        "paused": report.pause(entry, now),
    }
    if isinstance(item, Waiter):
        said["waiter"] = report.waiter(item, now)
        said["rate_wait_s"] = report.rate_wait(entry.rate, match.places, now)
    elif item is not None:
        said["holder"] = report.holder(item, now)
    return said


def _is_there(match: Match) -> bool:
    item = match.item
    if isinstance(item, Hold):
        return not item.ended
    if item is not None:
        return item.entry.waiters is not None and item.state != GONE and item.state != UNTOLD
    return match.entry.is_used
