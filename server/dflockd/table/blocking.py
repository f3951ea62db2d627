"""Which runs wait for which, over several keys: holders that wait themselves, and deadlocks.

A run is known at all its locks by its label, ``task[id] ...``, else by its owner. One with neither
cannot be a link. Only the keys of this table are seen, so a circle over two servers is not.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, final

from dflockd.table.grouped import GroupedQueue
from dflockd.table.state import Entry, Hold, Partition, Waiter
from dflockd.table.states import GONE, UNTOLD

STEP: Final = 16
"""Keys and waiters that are looked at in one step."""

MOST_LINKS: Final = 1000
"""Holders who wait that one look follows; of more the rest are left out."""

_task: Final = re.compile(rb"\S+\[[^\]\s]+\]").match


class Link(NamedTuple):
    """Somebody waits for a key, and this one of its holders waits too, or is where the chain ends."""

    waiter: Waiter
    hold: Hold


def run_of(item: Hold | Waiter) -> bytes:
    """Return who somebody is at all of their keys; empty if that cannot be said."""
    if isinstance(item, Hold) and item.detached:
        return b""  # nobody runs on the strength of it
    found = _task(item.label)
    if found is not None:
        return found[0]
    return b"run " + item.owner.id if item.owner is not None else b""


@final
class DeadlockSearch:
    """One look at a table, in steps, while it changes.

    Attributes:
        longest: most waits in a row: 1 where nobody who is waited for waits, 0 where nobody waits.
        since: when the longest wait began; infinity where nobody waits.
        groups: in how many somebody waits, of the keys where groups take turns.
        circles: the circles of links, each verified to be there when the look ended.
    """

    def __init__(self, partitions: Iterable[Partition]) -> None:
        self._entries: list[Entry] = []
        for partition in partitions:
            for space in partition.spaces:
                self._entries.extend(space.values())
        self._contended: list[Entry] = []
        self._holds: dict[bytes, None] = {}
        """The runs that hold something that others wait for."""
        self._items: Iterator[Waiter] = iter(())
        """Those at one of these keys who are still to be looked at."""
        self._waits: dict[bytes, list[Waiter]] = {}
        """Those of them who wait."""
        self.longest = 0
        self.since = math.inf
        self.groups = 0
        self.circles: list[list[Link]] = []

    def step(self) -> bool:
        """Go on; return whether that was the last of it."""
        for _ in range(STEP):
            if self._entries:
                self._look_at(self._entries.pop())
                continue
            waiter = next(self._items, None)
            if waiter is not None:
                self._ask(waiter)
            elif self._contended:
                self._items = iter(self._contended.pop().waiters or ())
            else:
                self._conclude()
                return True
        return False

    def _look_at(self, entry: Entry) -> None:
        queue = entry.waiters
        if queue is None or not queue:
            return
        self.longest = 1
        if isinstance(queue, GroupedQueue):
            self.groups += queue.groups
        self._contended.append(entry)
        for hold in itertools.islice(entry.holds.values(), STEP):
            run = run_of(hold)
            if run:
                self._holds[run] = None

    def _ask(self, waiter: Waiter) -> None:
        self.since = min(self.since, waiter.since)
        run = run_of(waiter)
        if run not in self._holds:
            return
        if run in self._waits:
            self._waits[run].append(waiter)
        elif len(self._waits) < MOST_LINKS:
            self._waits[run] = [waiter]

    # At the end, at one moment: what is no more so by now leaves no trace.

    def _conclude(self) -> None:
        graph: dict[bytes, dict[bytes, Link]] = {}
        """Whom each of them waits for, among those who wait themselves; all of the holders do."""
        blocked: dict[bytes, list[bytes]] = {}
        for run, waiters in self._waits.items():
            for waiter in waiters:
                if _waits(waiter) and not _is_retry(run, waiter):
                    blocked.setdefault(run, [])
                    self._connect(run, waiter, graph, blocked)
        self._measure(blocked)
        waited_for: dict[bytes, list[bytes]] = {}
        """By whom each of them is."""
        for run, holders in graph.items():
            for other in holders:
                waited_for.setdefault(other, []).append(run)
        # A run that waits for one that can go on is in no circle: what is left is.
        stuck = set(graph)
        _take_out([run for run in waited_for if run not in graph], waited_for, stuck)
        for run in sorted(stuck):
            if run in stuck:
                circle = self._circle(run, graph)
                self.circles.append(circle)
                _take_out([run_of(link.waiter) for link in circle], waited_for, stuck)

    def _connect(
        self,
        run: bytes,
        waiter: Waiter,
        graph: dict[bytes, dict[bytes, Link]],
        blocked: dict[bytes, list[bytes]],
    ) -> None:
        holders: dict[bytes, Link] = {}
        entry = waiter.entry
        can_go_on = entry.used + min(waiter.weight, entry.limit) <= entry.limit
        for hold in itertools.islice(waiter.entry.holds.values(), STEP + 1):
            other = run_of(hold)
            if other in self._waits:
                holders[other] = Link(waiter, hold)
                blocked[run].append(other)
            else:
                can_go_on = True
        if holders and not can_go_on and len(holders) <= STEP:
            graph[run] = holders

    def _measure(self, blocked: dict[bytes, list[bytes]]) -> None:
        """Find the longest chain: of each run once, however many wait for it."""
        depth: dict[bytes, int] = {}
        for first in blocked:
            way = [first]
            while way:
                run = way[-1]
                if depth.get(run):
                    way.pop()
                    continue
                depth[run] = 0  # under way: a circle has no length
                further = [each for each in blocked[run] if each in blocked and each not in depth]
                if further:
                    way.append(further[0])
                    continue
                others = [depth[each] for each in blocked[run] if each in blocked]
                depth[run] = 1 + max(others, default=0)
                way.pop()
        if depth:
            # And the one that waits for the first of them, which one does.
            self.longest = 1 + max(depth.values())

    def _circle(self, start: bytes, graph: dict[bytes, dict[bytes, Link]]) -> list[Link]:
        seen: dict[bytes, None] = {}
        run = start
        while run not in seen:
            seen[run] = None
            run = next(iter(graph[run]))
        way = list(seen)
        way = way[way.index(run) :]
        first = way.index(min(way))  # one circle is said in the same words each time
        way = way[first:] + way[:first]
        return [graph[each][way[(at + 1) % len(way)]] for at, each in enumerate(way)]


def _take_out(runs: list[bytes], waited_for: dict[bytes, list[bytes]], stuck: set[bytes]) -> None:
    """Take some out of the stuck, and all who wait for one of them, or for one who does."""
    stuck.difference_update(runs)
    while runs:
        for run in waited_for.get(runs.pop(), ()):
            if run in stuck:
                stuck.remove(run)
                runs.append(run)


def _is_retry(run: bytes, waiter: Waiter) -> bool:
    """Whether a run waits for its own last attempt, which goes on."""
    holds = itertools.islice(waiter.entry.holds.values(), STEP)
    return waiter.owner is not None and any(run_of(hold) == run for hold in holds)


def _waits(waiter: Waiter) -> bool:
    return waiter.state != GONE and waiter.state != UNTOLD and not waiter.is_away


def in_words(circle: list[Link]) -> str:
    """Return who is in a circle, and for what they wait."""
    text = run_of(circle[0].waiter).decode()
    for link in circle:
        joint = "" if link is circle[0] else ", which"
        holder = run_of(link.hold).decode()
        text += f"{joint} waits for {link.waiter.entry.key.decode()}, held by {holder}"
    return text
