"""What people see of the table: who holds what, since when, and who waits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias, final

from dflockd.table.pauses import NEVER
from dflockd.table.rates import KeyRate
from dflockd.table.state import UNKNOWN, Entry, Hold, Partition, Waiter
from dflockd.wire import ALL, UNLIMITED, Space

STEP: Final = 16
"""Keys, holders or waiters that are described in one step."""

MAX_LISTED = 1000
"""Keys, holders or waiters that one report lists."""

MAX_BYTES = 1_000_000
"""Bytes of JSON that a report lists: published clients refuse a line over 1 MiB."""

_Listed: TypeAlias = tuple[Iterator[Any], Callable[[Any, float], dict[str, object]]]
"""What is listed, and how each is described."""


@final
class Listing:
    """A report that is made in steps: what is said of the whole, and lists until there is enough.

    Args:
        said: what is said of the whole.
        lists: what is listed, by name, as it is now; what has ended before its turn comes is left out.
        omitted: how many are left out already.
    """

    def __init__(
        self, said: Mapping[str, object], lists: Mapping[str, _Listed], omitted: int
    ) -> None:
        self._said = said
        self._lists = list(lists.items())[::-1]
        self._texts: dict[str, list[str]] = {name: [] for name in lists}
        self._omitted = omitted
        self._size = 0

    def step(self, now: float) -> bool:
        """Go on for a moment; return whether that was the last of it."""
        for _ in range(STEP):
            if not self._lists:
                return True
            name, (items, describe) = self._lists[-1]
            item = next(items, None)
            if item is None:
                self._lists.pop()
                continue
            text = json.dumps(describe(item, now), separators=(",", ":"), ensure_ascii=False)
            self._size += len(text.encode()) + 1
            if self._size < MAX_BYTES:
                self._texts[name].append(text)
            else:
                self._omitted += 1
        return False

    def text(self) -> bytes:
        """Return the report as JSON, after the last step."""
        said = json.dumps(
            {**self._said, "omitted": self._omitted}, separators=(",", ":"), ensure_ascii=False
        )
        lists = (f',"{name}":[{",".join(texts)}]' for name, texts in self._texts.items())
        return f"{said[:-1]}{''.join(lists)}}}".encode()


def stats(
    partitions: Iterable[Partition], size: int, said: dict[str, object], most: int = MAX_LISTED
) -> Listing:
    """Return who holds what, in the form that published clients check.

    Of the `size` keys those beyond `most` are left out and counted as ``omitted``.
    """
    entries: list[Entry] = []
    most = min(size, most)
    for partition in partitions:
        if len(entries) >= most:
            break
        for space in partition.spaces:
            if space:
                entries += itertools.islice(space.values(), most - len(entries))
    # Entries are dropped as soon as they are idle, so there is nothing to list there.
    said = {"idle_locks": [], "idle_semaphores": [], **said}
    lists: dict[str, _Listed] = {
        "locks": (_there(entries, semaphores=False), _lock),
        "semaphores": (_there(entries, semaphores=True), _semaphore),
    }
    return Listing(said, lists, size - len(entries))


def inspect(key: bytes, entry: Entry | None, now: float, known: KeyRate | None) -> Listing:
    """Return who holds a key and who waits for it, in order; times in seconds.

    Of more than `MAX_LISTED` holders or waiters the last are left out and counted as ``omitted``.
    """
    holds = entry.holds.values() if entry is not None else ()
    waiters = (entry.waiters or ()) if entry is not None else ()
    said = {
        "key": key.decode(),
        **of_key(entry, known, now),
        **(changed_limit(entry, now) if entry is not None else {}),
    }
    # In one piece: by the next step another waiter may be the first.
    first = list(itertools.islice(holds, MAX_LISTED))
    queue = list(itertools.islice(waiters, MAX_LISTED))
    omitted = len(holds) - len(first) + len(waiters) - len(queue)
    lists: dict[str, _Listed] = {"holders": (iter(first), holder), "waiters": (iter(queue), waiter)}
    return Listing(said, lists, omitted)


def of_key(entry: Entry | None, known: KeyRate | None, now: float) -> dict[str, object]:
    """Return what there is to say of a key as a whole, also of a free one; times in seconds."""
    return {
        "limit": limit(entry) if entry is not None else None,
        **used(entry),
        "rate": rate(known, now),
        "pace_s": pace(entry, now) if entry is not None else None,
        "paused": pause(entry, now) if entry is not None else None,
    }


def _there(entries: list[Entry], *, semaphores: bool) -> Iterator[Entry]:
    """Yield those that are there when their turn comes."""
    for entry in entries:
        if _is_semaphore(entry) is semaphores and entry.is_used:
            yield entry


def _is_semaphore(entry: Entry) -> bool:
    return entry.space == Space.SEMAPHORE and entry.limit != 1


def _lock(entry: Entry, now: float) -> dict[str, object]:
    # Without a holder while it is paused, or grants are withheld from those who wait.
    hold = next(iter(entry.holds.values()), None)
    are_several = entry.limit != 1 or len(entry.holds) > 1  # the latter if the limit was more
    return {
        "key": entry.key.decode(),
        "owner_conn_id": hold.peer.id if hold and hold.peer else 0,
        "label": hold.label.decode() if hold else "",
        "held_s": round(now - hold.since, 3) if hold else 0.0,
        "lease_expires_in_s": round(hold.deadline - now, 3) if hold else 0.0,
        "waiters": len(entry.waiters or ()),
        **({"limit": entry.limit, "holders": len(entry.holds)} if are_several else {}),
        **changed_limit(entry, now),
        **used(entry),
        **({} if hold is None else newer(hold)),
        **({"group": hold.group.decode()} if hold is not None and hold.group else {}),
        **({"rate": known} if (known := rate(entry.rate, now)) is not None else {}),
        **({"paused": paused} if (paused := pause(entry, now)) is not None else {}),
    }


def _semaphore(entry: Entry, _now: float) -> dict[str, object]:
    return {
        "key": entry.key.decode(),
        "limit": entry.limit,
        "holders": len(entry.holds),
        "waiters": len(entry.waiters or ()),
    }


def holder(hold: Hold, now: float) -> dict[str, object]:
    """Return what there is to say of a holder; times in seconds."""
    return {
        "label": hold.label.decode(),
        **owner(hold),
        "group": hold.group.decode(),
        **weight(hold.weight),
        "fence": hold.fence,
        "conn_id": hold.peer.id if hold.peer else 0,
        **_age(hold),
        **newer(hold),
        "held_s": round(now - hold.since, 3),
        "lease_s": lease(hold),
        "lease_expires_in_s": round(hold.deadline - now, 3),
    }


def _age(item: Hold | Waiter) -> dict[str, object]:
    """Return the age of a run that has one."""
    return {"age": item.age} if item.age else {}


def waiter(item: Waiter, now: float) -> dict[str, object]:
    """Return what there is to say of somebody who waits; times in seconds."""
    return {
        "label": item.label.decode(),
        **owner(item),
        **_age(item),
        "group": "" if item.group is None else item.group.name.decode(),
        **weight(item.weight),
        "conn_id": item.peer.id,
        "waited_s": round(now - item.since, 3),
        "away": item.is_away,
        "told": item.is_told,
    }


def pace(entry: Entry, now: float) -> float | None:
    """Return the seconds from a grant of a key to the next, of late; ``None`` before the first."""
    queue = entry.waiters
    if queue is None or queue.gap < 0:
        return None
    # Longer if the next is overdue.
    return round(max(queue.gap, now - queue.last if queue else 0.0), 3)


def pause(entry: Entry, now: float) -> dict[str, object] | None:
    """Return by whom a key is paused and why, for how long it has been and will be, in seconds.

    ``None`` if it is not. What does not end by itself has no ``left_s``.
    """
    if entry.pause is None:
        return None
    _, by, reason, since, until = entry.pause.record
    return {
        "by": by.decode(),
        "reason": reason.decode(),
        "paused_s": round(now - since, 3),
        "left_s": None if until == NEVER else round(max(0.0, until - now), 3),
    }


def newer(hold: Hold) -> dict[str, object]:
    """Return by whom a holder was asked to stop; nothing of one that takes no part in that."""
    if not hold.age:
        return {}
    by = hold.entry.partition.newer_than(hold.entry.key, hold.age)
    return {"superseded_by": "" if by is None else by.label.decode()}


def limit(entry: Entry) -> int | None:
    """Return how many may hold a key at once, if that has a bound and is known."""
    return None if entry.limit in (0, UNLIMITED) else entry.limit


def changed_limit(entry: Entry, now: float) -> dict[str, object]:
    """Return what the limit was when the first holder was granted, and when it has changed last.

    Nothing once all holders are of the time since, or if that is not known.
    """
    hold, queue = next(iter(entry.holds.values()), None), entry.waiters
    if hold is None or queue is None or queue.resized < 0.0 or hold.limit == entry.limit:
        return {}
    if limit(entry) is None or hold.limit in (UNKNOWN, UNLIMITED):
        return {}
    since_s = round(now - queue.resized, 3)
    return {"changed_limit": {"is": entry.limit, "was": hold.limit, "since_s": since_s}}


def used(entry: Entry | None) -> dict[str, object]:
    """Return how many slots of a key are taken, if that is not one for each holder."""
    if entry is None or entry.used == len(entry.holds):
        return {}
    return {"used": entry.used if entry.used < ALL else entry.limit}


def weight(slots: int) -> dict[str, object]:
    """Return how many slots somebody takes, if that is not one."""
    return {} if slots == 1 else {"weight": "all" if slots == ALL else slots}


def rate(known: KeyRate | None, now: float) -> dict[str, object] | None:
    """Return how many runs of a key may begin in a while, and when the next may; times in seconds.

    The next one may at once, after ``next_s``, or once a run that may begin has begun (``None``).
    """
    if known is None:
        return None
    free, at = known.free(now), known.next(now, 0)
    return {
        "runs": known.runs,
        "window_s": known.window,
        "free": max(0, free),
        "pending": known.taken,
        "next_s": None if at is None else round(max(0.0, at - now), 3),
    }


def places_up_to(before: int, waiter: Waiter) -> int:
    """Return how many places of a rate those up to a waiter need, with those before it.

    With what is left of a window for which it needs too many: nobody passes it meanwhile.
    """
    rate = waiter.entry.rate
    if rate is None:
        return before
    needed = min(waiter.weight, rate.runs)
    left = -before % rate.runs
    return before + needed + (left if needed > left else 0)


def rate_wait(known: KeyRate | None, places: int, now: float) -> float | None:
    """Return in how many seconds a rate has so many places, if all who have some begin at once.

    ``None`` while that depends on when a run begins that may, and without a rate.
    """
    if known is None or not places:
        return None
    rounds, more = divmod(places - 1, known.runs)
    at = known.next(now, more)
    return None if at is None else round(max(0.0, at - now) + rounds * known.window, 3)


def lease(hold: Hold) -> object:
    """Return how long a hold was last set to run, in seconds: nearly always a whole number.

    It is reported as one, even if the table is compiled and has only floats.
    """
    return int(hold.span) if hold.span == int(hold.span) else round(hold.span, 3)


def owner(item: Hold | Waiter) -> dict[str, object]:
    """Return which run it is, and which of its attempts; the run of nobody is empty."""
    run = item.owner
    return {
        "owner": run.id.decode() if run is not None else "",
        "attempt": run.attempt if run is not None else 0,
    }
