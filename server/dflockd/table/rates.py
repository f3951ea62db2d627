"""How many runs of a key may begin in a window, and which have.

A grant takes a *place* of the rate. The run says when it has begun, and one window later the place
is free. If the run does not say so, its place is taken for longer, never for less.

There can be a million of them, of keys that nobody uses for a day. So what rests for long is packed,
several rates together: one with one run takes 200 bytes then, in memory and for the journal, not 1000.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from dflockd.table.counts import Counts
from dflockd.table.deadlines import SPAN_STEP, Deadlines, Timed, rounded
from dflockd.table.limits import STEP, Limits
from dflockd.wire import Rate, Status

BLOCK = 32
"""So many beginnings are recorded together at most: a record on disk is written anew for each that
joins it, and has a bound (`dflockd.storage.journal.LONGEST`)."""

LATE = 0.0002
"""Seconds by which a place is checked after it is free, because times are not exact numbers."""


MOST_OPEN = 10_000
"""Rates of free keys that are not packed: a key that is used again and again costs no packing."""

PACKED = 16
"""How many rates one pack holds at most."""

PACKED_BYTES = 800
"""How many bytes one pack holds at most: its record on disk is written anew whenever a rate joins
or leaves it."""


class RateRecord(NamedTuple):
    """What is kept of a rate where it outlives the table: one block of it; times in seconds."""

    space: int
    key: bytes
    runs: int
    window: float
    number: int
    """Of the block: the later of one rate has the larger one."""
    begun: tuple[float, ...]
    """When runs have begun, in order, and behind each time how many places it took."""


class PackedRecord(NamedTuple):
    """What is kept of some rates that rest."""

    number: int
    """As of a `RateRecord`."""
    names: tuple[bytes, ...]
    """Of each one byte for its space, and its key."""
    numbers: array[float]
    """Of each how many may run in which window, then how many numbers say what has begun, and these
    as in a `RateRecord`."""


class RateBook:
    """The rates of one partition.

    Args:
        entries: those of the partition, by `Space` and key.
    """

    __slots__ = ("entries", "open", "packed", "since")

    def __init__(self, entries: list[dict[bytes, Any]]) -> None:
        self.entries = entries
        self.open: dict[tuple[int, bytes], KeyRate] = {}
        """Whose runs may not begin at any time, by namespace and key; their keys may be free."""
        self.packed: dict[bytes, PackedRates] = {}
        """The same of free keys that have not been used for long, by the name there."""
        self.since = -math.inf
        """Runs may have begun before that nobody knows of here any more."""


class RateBlock:
    """Some beginnings of a rate, in order."""

    __slots__ = ("begun", "ended", "first", "number", "places", "rate")

    def __init__(self, rate: KeyRate, number: int) -> None:
        self.rate = rate
        self.number = number
        self.begun: array[float] = array("d")
        """As in a `RateRecord`."""
        self.first = 0
        """So many of these numbers are of runs that have begun over a window ago."""
        self.places = 0
        """How many places the others take."""
        self.ended = False
        """Whether it is of no more use."""

    def kept(self) -> RateRecord:
        """Return what is worth keeping."""
        rate = self.rate
        begun = tuple(self.begun[self.first :])
        return RateRecord(rate.space, rate.key, rate.runs, rate.window, self.number, begun)

    def add(self, begun: Sequence[float]) -> None:
        """Take in what has begun after all that is here."""
        self.begun.extend(begun)
        places = int(sum(begun[1::2]))
        self.places += places
        self.rate.begun += places


class KeyRate(Timed):
    """The runs of one key that have begun of late, or may begin at any time.

    It stays until nothing of it counts any more, whether or not its key is held or waited for. It falls
    due when somebody who waits can have a place, or else when it may be dropped.
    """

    __slots__ = (
        "begun",
        "blocks",
        "book",
        "key",
        "over",
        "pending",
        "runs",
        "space",
        "taken",
        "window",
    )

    def __init__(self, book: RateBook, space: int, key: bytes, runs: int, window: float) -> None:
        self.book = book
        self.space = space
        self.key = key
        self.runs = runs
        """How many runs may begin in one window."""
        self.window = window
        """The length of a window, in seconds."""
        self.pending: dict[int, int] = {}
        """Runs that may begin at any time: they have a hold, and have not reported their start. The
        number of places that each takes, by its fence."""
        self.taken = 0
        """How many places the pending runs take together."""
        self.blocks: list[RateBlock] = []
        """Those of the last window, and the last one in any case."""
        self.over = 0
        """In so many of the first ones nothing counts any more."""
        self.begun = 0
        """How many places those in them take that count."""

    def free(self, now: float) -> int:
        """Return how many places are free. It is less than none after `runs` has become less."""
        if now < self.book.since + self.window:
            return 0
        self._forget(now)
        return self.runs - self.taken - self.begun

    def take(self, fence: int, places: int) -> None:
        """Let somebody who has a hold take so many places."""
        self.taken += places - self.pending.get(fence, 0)
        self.pending[fence] = places

    def leave(self, fence: int) -> int:
        """Note that somebody may not begin any more; return how many places that was."""
        places = self.pending.pop(fence, 0)
        self.taken -= places
        return places

    def next(self, now: float, more: int) -> float | None:
        """Return when more than so many places are free; ``None`` if somebody has to begin before."""
        opens_at = self.book.since + self.window
        if now < opens_at:
            return opens_at
        over = self.taken + self.begun + more - self.runs
        if over < 0:
            return now
        for block in itertools.islice(self.blocks, self.over, None):
            if over >= block.places:
                over -= block.places
                continue
            at = block.first
            while (over := over - int(block.begun[at + 1])) >= 0:
                at += 2
            return block.begun[at] + self.window
        return None

    def kept(self, now: float) -> list[RateRecord]:
        """Return what is worth keeping: its last block, and others that count."""
        self._forget(now)
        last = self.blocks[-1]
        return [b.kept() for b in self.blocks if b is last or b.places]

    def _forget(self, now: float) -> None:
        """Let those be that have begun over a window ago; of very many the last count for longer."""
        window = self.window
        for block in itertools.islice(self.blocks, self.over, self.over + STEP):
            begun, first = block.begun, block.first
            count = bisect_right(begun[first::2], now, key=lambda time: time + window)
            block.first += 2 * count
            places = int(sum(begun[first + 1 : block.first : 2]))
            block.places -= places
            self.begun -= places
            if block.places or block is self.blocks[-1]:
                return
            self.over += 1


class PackedRates(Timed):
    """Some rates of free keys, in few bytes. They leave together, when nothing of them counts."""

    __slots__ = ("book", "ended", "kind", "names", "number", "numbers", "size")

    def __init__(self, book: RateBook, number: int, kind: int) -> None:
        self.book = book
        self.kind = kind
        """About how long their windows are, as a power of two."""
        self.number = number
        self.names: list[bytes] = []
        """The names of a `PackedRecord`."""
        self.numbers: array[float] = array("d")
        """The numbers of a `PackedRecord`."""
        self.size = 0
        """Bytes of all that."""
        self.ended = False
        """Whether it is of no more use."""

    def kept(self) -> PackedRecord:
        """Return what is worth keeping."""
        return PackedRecord(self.number, tuple(self.names), self.numbers)

    def add(self, name: bytes, runs: int, window: float, begun: array[float]) -> None:
        """Take in a rate."""
        self.names.append(name)
        self.numbers.extend((runs, window, len(begun)))
        self.numbers.extend(begun)
        self.size += packed_size(name, begun)

    def of(self, name: bytes) -> tuple[int, float, array[float]]:
        """Return what there is to say of a rate: its runs and window, and what has begun."""
        numbers, at = self.numbers, _starts(self.numbers)[self.names.index(name)]
        return int(numbers[at]), numbers[at + 1], numbers[at + 3 : at + 3 + int(numbers[at + 2])]

    def remove(self, name: bytes) -> None:
        """Forget a rate."""
        number = self.names.index(name)
        at = _starts(self.numbers)[number]
        begun = self.numbers[at + 3 : at + 3 + int(self.numbers[at + 2])]
        del self.names[number], self.numbers[at : at + 3 + len(begun)]
        self.size -= packed_size(name, begun)


def packed_size(name: bytes, begun: array[float]) -> int:
    """Return how many bytes a rate has among others."""
    return len(name) + 8 * (4 + len(begun))


def _starts(numbers: array[float]) -> list[int]:
    """Return where each of some packed rates begins."""
    starts, at = [], 0
    while at < len(numbers):
        starts.append(at)
        at += 3 + int(numbers[at + 2])
    return starts


def later(record: RateRecord | PackedRecord, by: float) -> RateRecord | PackedRecord:
    """Return what is kept of rates whose windows have not gone on for so many seconds."""
    if not by:
        return record
    if isinstance(record, RateRecord):
        begun = array("d", record.begun)
        begun[::2] = array("d", [time + by for time in begun[::2]])
        return record._replace(begun=tuple(begun))
    numbers = record.numbers[:]
    for at in _starts(numbers):
        for each in range(at + 3, at + 3 + int(numbers[at + 2]), 2):
            numbers[each] += by
    return record._replace(numbers=numbers)


def unpacked(record: PackedRecord) -> Iterator[RateRecord]:
    """Yield each of some rates that rest."""
    numbers = record.numbers
    for name, at in zip(record.names, _starts(numbers), strict=True):
        begun = tuple(numbers[at + 3 : at + 3 + int(numbers[at + 2])])
        yield RateRecord(name[0], name[1:], int(numbers[at]), numbers[at + 1], record.number, begun)


def _packed_name(space: int, key: bytes) -> bytes:
    return bytes((space,)) + key


class Rates:
    """The rates of one table.

    Args:
        deadlines: those of the table.
        counts: those of the table.
        limits: those of the table.
        note: is told of what has changed or is gone, if that is to be kept.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        counts: Counts,
        limits: Limits,
        note: Callable[[RateBlock | PackedRates], object] | None,
    ) -> None:
        self._deadlines = deadlines
        self._counts = counts
        self._limits = limits
        self._numbers = itertools.count(1)
        self.size = 0
        """How many there are."""
        self.promised = 0
        """How many beginnings may have to be remembered: the sum of what all rates allow."""
        self._append = note
        self._open: OrderedDict[KeyRate, None] = OrderedDict()
        """Those of free keys that are not packed; the one that was used longest ago first."""
        self._packing: dict[tuple[RateBook, int], PackedRates] = {}
        """Those to which others may be added, by their kind."""

    # What there is.

    def find(self, book: RateBook, space: int, key: bytes, now: float) -> KeyRate | None:
        """Return the rate of a key that has one."""
        rate = book.open.get((space, key))
        if rate is None and book.packed:
            packed = book.packed.get(_packed_name(space, key))
            if packed is not None:
                return self._unpack(packed, space, key, now)
        return rate

    def use(self, rate: KeyRate) -> None:
        """Note that somebody holds or waits for the key of a rate."""
        self._open.pop(rate, None)

    def rest(self, rate: KeyRate) -> None:
        """Note that nobody does any more."""
        if rate.book.open.get((rate.space, rate.key)) is rate:  # its partition may leave
            self._open[rate] = None

    @staticmethod
    def view(book: RateBook, space: int, key: bytes) -> KeyRate | None:
        """Return the rate of a key to look at, and leave it where it is."""
        rate = book.open.get((space, key))
        packed = None if rate is not None else book.packed.get(_packed_name(space, key))
        if packed is not None:
            runs, window, begun = packed.of(_packed_name(space, key))
            rate = KeyRate(book, space, key, runs, window)
            rate.blocks.append(RateBlock(rate, packed.number))
            rate.blocks[0].add(begun)
        return rate

    # What is asked.

    def refusal(self, book: RateBook, name: tuple[int, bytes], asked: Rate) -> Status | None:
        """Return what to answer to who asks for such a rate of a key, if it may not be."""
        if asked.window > self._limits.max_rate_window * 1000:
            return Status.RATE_WINDOW
        known = book.open.get(name)  # not packed, as long as its entry is there
        more = asked.runs if known is None else asked.runs - known.runs
        if more > 0 and self.promised + more > self._limits.max_rate_runs:
            self._counts.full += 1
            return Status.MAX_RATES
        return None

    def name(self, book: RateBook, name: tuple[int, bytes], asked: Rate, now: float) -> KeyRate:
        """Return the rate of a key, which from now on is what was asked last."""
        rate = book.open.get(name)
        if rate is None:
            return self._add(book, name, asked.runs, asked.window / 1000, now)
        self.change(rate, asked.runs, asked.window / 1000, now)
        return rate

    def change(self, rate: KeyRate, runs: int, window: float, now: float) -> None:
        """Have a rate allow so many runs in so many seconds."""
        if (rate.runs, rate.window) != (runs, window):
            self.promised += runs - rate.runs
            rate.runs, rate.window = runs, window
            self._note(rate.blocks[-1])
            # Somebody who waits may have a place with that.
            self._deadlines.reset(rate, LATE, now)

    def _add(
        self, book: RateBook, name: tuple[int, bytes], runs: int, window: float, now: float
    ) -> KeyRate:
        rate = book.open[name] = KeyRate(book, *name, runs, window)
        self.size += 1
        self.promised += runs
        self._deadlines.set(rate, rounded(window), now)
        self._note(self._block(rate))
        while len(self._open) > MOST_OPEN:
            oldest, _ = self._open.popitem(last=False)
            self._pack(oldest, now)
        return rate

    # What happens.

    def begin(self, rate: KeyRate, fence: int, now: float) -> bool:
        """Note that a run has begun; say whether that is news."""
        places = rate.leave(fence)
        if not places:
            return False
        self._counts.begun += 1
        block = rate.blocks[-1]
        if len(block.begun) >= 2 * BLOCK:
            block = self._renewed(rate)
        block.add((now, places))
        self._note(block)
        return True

    def give_back(self, rate: KeyRate, fence: int) -> bool:
        """Note that a run will not begin; say whether it had not."""
        if not rate.leave(fence):
            return False
        self._counts.unbegun += 1
        return True

    def wake(self, rate: KeyRate, more: int, now: float) -> None:
        """Have the rate fall due when more than so many places are free: somebody waits for one."""
        at = rate.next(now, more)
        if at is not None and at != now and at < rate.deadline:
            # It is over where there are too many to look through at once: then the next look is soon.
            self._deadlines.reset(rate, max(0.0, at - now) + LATE, now)

    def look_again(self, rate: KeyRate, now: float, *, is_used: bool) -> bool:
        """Say whether a rate that is due can be dropped; if not, it falls due again.

        Args:
            rate: it, whose deadline is not set any more.
            now: the time.
            is_used: whether anybody waits for its key.
        """
        is_open = now >= rate.book.since + rate.window
        free = rate.free(now)
        if self._shed(rate):
            self._deadlines.set(rate, LATE, now)
            return False
        if is_open and free == rate.runs and not is_used:
            self._drop(rate)
            return True
        last = rate.blocks[-1].begun
        until = last[-2] + rate.window if last else now + rate.window
        self._deadlines.set(rate, max(rounded(until - now), SPAN_STEP), now)
        return False

    def _drop(self, rate: KeyRate) -> None:
        del rate.book.open[rate.space, rate.key]
        self._open.pop(rate, None)
        self.size -= 1
        self.promised -= rate.runs
        self._empty(rate)

    def leave(self, book: RateBook) -> None:
        """Forget those of a book that leaves."""
        for rate in book.open.values():
            self._deadlines.clear(rate)
            self._open.pop(rate, None)
            self.size -= 1
            self.promised -= rate.runs
        book.open.clear()
        for packed in dict.fromkeys(book.packed.values()):
            self._deadlines.clear(packed)
            self.drop(packed)

    # What outlives the table.

    def restore(self, book: RateBook, record: RateRecord, now: float) -> None:
        """Take in a block of a rate; those of one rate come in their order."""
        name = record.space, record.key
        rate = self.find(book, *name, now)
        if rate is None:
            rate = self._add(book, name, record.runs, record.window, now)
        else:
            self.change(rate, record.runs, record.window, now)
        if rate.blocks[-1].begun:
            self._block(rate)
        block = rate.blocks[-1]
        block.add(record.begun)
        self._note(block)
        if record.key not in book.entries[record.space]:
            self.rest(rate)

    def restore_packed(self, book: RateBook, record: PackedRecord, now: float) -> None:
        """Take in some rates that rested."""
        names, rates = record.names, book.open
        if not book.packed.keys().isdisjoint(names) or (
            rates and any((name[0], name[1:]) in rates for name in names)
        ):
            for each in unpacked(record):
                self.restore(book, each, now)
            return
        packed = PackedRates(book, next(self._numbers), 0)
        packed.names.extend(names)
        packed.numbers = record.numbers
        packed.size = PACKED_BYTES
        until, at, numbers = now, 0, packed.numbers
        while at < len(numbers):
            self.promised += int(numbers[at])
            window, size = numbers[at + 1], int(numbers[at + 2])
            at += 3 + size
            if size:
                until = max(until, numbers[at - 2] + window)
        self.size += len(names)
        book.packed.update(dict.fromkeys(names, packed))
        self._deadlines.set(packed, rounded(until - now), now)
        self._note(packed)

    @staticmethod
    def packed(book: RateBook) -> Iterator[RateRecord]:
        """Yield those of a book that are packed."""
        for packed in dict.fromkeys(book.packed.values()):
            yield from unpacked(packed.kept())

    # Packed.

    def _pack(self, rate: KeyRate, now: float) -> None:
        """Put a rate to others that rest, if it is not too large for that."""
        book, [block, *more] = rate.book, rate.blocks
        rate.free(now)
        name, begun = _packed_name(rate.space, rate.key), block.begun[block.first :]
        size = packed_size(name, begun)
        if more or size > PACKED_BYTES:
            return
        self._deadlines.clear(rate)
        del book.open[rate.space, rate.key]
        self._empty(rate)
        kind = math.frexp(rate.window)[1]
        packed = self._packing.get((book, kind))
        if packed is None or packed.size + size > PACKED_BYTES or len(packed.names) >= PACKED:
            packed = self._packing[book, kind] = PackedRates(book, next(self._numbers), kind)
        last = (begun[-2] if begun else now) + rate.window
        if not packed.names:
            self._deadlines.set(packed, rounded(last - now), now)
        elif packed.deadline < last:
            self._deadlines.reset(packed, rounded(last - now), now)
        packed.add(name, rate.runs, rate.window, begun)
        book.packed[name] = packed
        self._note(packed)

    def _unpack(self, packed: PackedRates, space: int, key: bytes, now: float) -> KeyRate:
        book, name = packed.book, _packed_name(space, key)
        runs, window, begun = packed.of(name)
        packed.remove(name)
        del book.packed[name]
        self.size -= 1
        self.promised -= runs
        if packed.names:
            self._note(packed)
        else:
            self._deadlines.clear(packed)
            self.drop(packed)
        rate = self._add(book, (space, key), runs, window, now)
        rate.blocks[-1].add(begun)
        return rate

    def drop(self, packed: PackedRates) -> None:
        """Forget rates of which nothing counts any more; their deadline is not set any more."""
        for name, at in zip(packed.names, _starts(packed.numbers), strict=True):
            del packed.book.packed[name]
            self.size -= 1
            self.promised -= int(packed.numbers[at])
        if self._packing.get((packed.book, packed.kind)) is packed:
            del self._packing[packed.book, packed.kind]
        packed.ended = True
        self._note(packed)

    # Blocks.

    def _block(self, rate: KeyRate) -> RateBlock:
        block = RateBlock(rate, next(self._numbers))
        rate.blocks.append(block)
        return block

    def _renewed(self, rate: KeyRate) -> RateBlock:
        """Return an empty block, and drop those in which nothing counts any more."""
        self._shed(rate)
        return self._block(rate)

    def _shed(self, rate: KeyRate) -> bool:
        """Drop blocks in which nothing counts any more, or some of them; say whether there were any."""
        over = rate.blocks[: min(rate.over, STEP)]
        del rate.blocks[: len(over)]
        rate.over -= len(over)
        for block in over:
            self._end(block)
        return bool(over)

    def _empty(self, rate: KeyRate) -> None:
        """End all blocks of a rate that is gone, which refer to it: else both would stay for long."""
        for block in rate.blocks:
            self._end(block)
        rate.blocks.clear()

    def _end(self, block: RateBlock) -> None:
        block.ended = True
        self._note(block)

    def _note(self, what: RateBlock | PackedRates) -> None:
        if self._append is not None:
            self._append(what)
