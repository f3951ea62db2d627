"""The journal: what the table holds, on disk, so that it outlives the process.

A directory of segments, files of one size that are mapped into memory. To record a change is to copy
some hundred bytes: no system call, no wait. The kernel keeps what was copied, whatever happens to
the process. Only a crash of the machine can lose it; `dflockd.storage.reading` works out what that
may have cost. A thread syncs what was copied every second (`dflockd.storage.syncing`), and notes in
each segment how far it is.

A record is complete in itself: it says all of a hold, or that one has ended. So live records can be
moved to the end at any time. The oldest segments are then of no use, and are deleted once what was
moved is on the disk. A few live records are moved with each new one, once there is more on disk
than the live ones call for (the cleaning of a log-structured store; Rosenblum and Ousterhout,
1992): no pause to compact.

Each process writes a generation of its own, and which one counts is said elsewhere (in the state
file), in one step: times on another clock and the torn last record of another process never mix
with what is new.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from mmap import mmap
from typing import Final

from dflockd.storage.disk import Disk, Mapped
from dflockd.storage.reading import ALL_NAMES, name_of, names_of
from dflockd.storage.records import (
    Name,
    PausedKey,
    encode_end,
    encode_hold,
    encode_newest,
    encode_packed,
    encode_pause,
    encode_rate,
    moved,
)
from dflockd.storage.segment import (
    END,
    FIRST,
    LOW,
    NOTHING,
    RECORDS,
    SYNCED,
    WORD,
    SegmentStage,
    header,
    seed_of,
    word,
)
from dflockd.table import Change, Hold, Newest
from dflockd.table.pauses import KeyPause
from dflockd.table.rates import PackedRates, RateBlock

SEGMENT = 4 << 20
"""Bytes of one segment."""

LONGEST: Final = 1024
"""Bytes that no record exceeds: a key, a label, an owner, a group and some numbers."""

MOVED = 2
"""How many live records are moved with each new one while there is too much on disk."""


def _nothing(*_: object) -> None:
    pass


class _Segment:
    """A segment that is written, or was and is not yet on the disk."""

    __slots__ = ("end", "file", "mapped", "number")

    def __init__(self, number: int, file: int, mapped: Mapped) -> None:
        self.number = number
        self.file = file
        self.mapped = mapped
        self.end = RECORDS
        """How far records count: behind it stand at most those of a step that has not ended."""


class Journal:
    """One generation of the journal in a directory: what one process writes.

    One thread records; `sync` may be called by one other.

    Args:
        disk: where the segments are, and nothing else of that name.
        identity: the identity of the directory (16 bytes).
        generation: its number, from 1.
    """

    def __init__(self, disk: Disk, identity: bytes, generation: int) -> None:
        self.wake: Callable[[], object] = _nothing
        """Called when there is something to sync, once for each `sync`."""
        self.longest = math.inf
        """Seconds. With a longer lease than that, of somebody who runs, `lengthen` is called first."""
        self.lengthen: Callable[[float], object] = _nothing
        self._disk = disk
        self._identity = identity
        self._generation = generation
        self._live: OrderedDict[Name, tuple[Change, int, int]] = OrderedDict()
        """What it is, and number of the segment and size of its latest record."""
        self._live_bytes = 0
        self._oldest = 1
        """The first segment that has something live in it."""
        self._is_cleaning = False
        self._fence = 0
        self._current: _Segment
        self._data: mmap
        self._words: memoryview
        self._seed = 0
        """Of the current segment, where every record can get at them."""
        self._position = 0
        """Where the next record goes."""
        self._number = 0
        self._ends: dict[int, int] = {}
        """How far records count in the segments that were left for the next one."""
        self._is_synced = True
        self._turned: deque[_Segment] = deque()
        """Segments that were left for the next one, and are not on the disk yet."""
        # What the thread that syncs alone changes.
        self._first = 1
        """The first segment that has not been deleted."""
        self._named = 0
        """The last segment whose name is on the disk."""

    @property
    def free(self) -> int:
        """Bytes that are free where it is; 0 if that cannot be learned."""
        try:
            return self._disk.free()
        except OSError:
            return 0

    @property
    def segments(self) -> int:
        """How many files it has."""
        return self._number - self._first + 1

    @property
    def live_size(self) -> int:
        """Bytes of it that count: the latest record of each hold."""
        return self._live_bytes

    def start(self, holds: Iterable[Change], fence: int) -> None:
        """Begin with what a table holds, and have that on the disk on return.

        Args:
            holds: all that are in it, and what else is to be kept, as `record` has it.
            fence: the last one that was given out.

        Raises:
            OSError: there is no room, or no permission.
        """
        # Of a process that ended before its generation counted.
        self._disk.unlink(self._disk.names(names_of(self._generation)))
        self._fence = fence
        self._turn()
        for hold in holds:
            if isinstance(hold, Hold):
                self._put(hold)
            else:
                self._change(hold)
        self.record((), fence)
        self.sync()
        self.sync()  # its own mark

    def record(self, changes: Sequence[Change], fence: int) -> None:
        """Write down what has begun, been extended or ended: all of it, or nothing.

        If this fails, whatever it raises, the table holds what is not on the disk. Nothing may be
        granted any more.

        Args:
            changes: as `LockTable.changes` lists them.
            fence: the last one that was given out.

        Raises:
            OSError: there is no room for another segment.
        """
        self._fence = fence
        for hold in changes:
            if not isinstance(hold, Hold):
                self._change(hold)
            elif hold.fence in hold.entry.holds:
                # Before the record, and on the disk: if the machine crashes, a recovery waits for the
                # longest lease that is noted there. A longer one would outlast it, with the next holder
                # beside it.
                if hold.span > self.longest and not hold.detached:
                    self.lengthen(hold.span)
                self._put(hold)
            else:
                self._end(hold.fence)
            if self._is_cleaning:
                self._move()
        position, current = self._position, self._current
        if position != current.end:
            # After the records, as one word: killed before it, the step has never been, and its replies
            # have not been sent either.
            self._words[END] = NOTHING - position * LOW  # word(position), in fewer steps
            current.end = position  # after it: `sync` says that so much is on the disk
            if self._is_synced:
                self._is_synced = False
                self.wake()
        if self._is_cleaning:
            # What was moved counts from here on, so that its old segments are of no more use.
            self._oldest = self._first_live()[1]
            self._is_cleaning = self._has_too_much()

    def sync(self) -> None:
        """Have what was recorded until now on the disk, and delete what is of no more use.

        Raises:
            OSError: it is not there. Nothing may be granted any more.
        """
        self._is_synced = True
        # In this order: what was moved before `oldest` was set is in the segments seen after it, and
        # whatever a later segment follows is among those that were turned from. Those may be more by
        # now: `current` and what came after it are for the next time.
        oldest, current = self._oldest, self._current
        end, number = current.end, current.number
        turned = [each for each in list(self._turned) if each.number < number]
        for each in turned:
            self._disk.sync(each.file)
        self._disk.sync(current.file)
        if number > self._named:
            self._disk.sync_names()
            self._named = number
        self._mark(current, SYNCED, end)
        if oldest > self._first:
            # On the disk before they are deleted: else they would be missed.
            self._mark(current, FIRST, oldest)
            self._disk.sync(current.file)
            numbers = range(self._first, oldest)
            self._disk.unlink(name_of(self._generation, old) for old in numbers)
            self._first = oldest
        for each in turned:
            self._turned.popleft()
            self._disk.close(each.file)

    def drop_others(self) -> None:
        """Delete the segments of all other generations.

        Raises:
            OSError: they cannot be deleted.
        """
        mine = set(self._disk.names(names_of(self._generation)))
        self._disk.unlink(name for name in self._disk.names(ALL_NAMES) if name not in mine)

    def close(self) -> list[list[int]]:
        """Say that it ends here, and have all of it on the disk.

        Returns:
            Number and end of each of its segments.

        Raises:
            OSError: it is not there.
        """
        current = self._current
        self._words[END] = word(current.end, SegmentStage.CLOSED)
        current.mapped.close()
        self.sync()
        self._disk.close(current.file)
        self._ends[current.number] = current.end
        return [[number, end] for number, end in self._ends.items() if number >= self._first]

    def _change(self, what: Newest | RateBlock | PackedRates | KeyPause) -> None:
        """Record the newest of a key, a pause or some beginnings of rates, or that they are over."""
        name: Name
        if isinstance(what, Newest):
            name = what.key
        elif isinstance(what, KeyPause):
            name = PausedKey(what.key)
        else:
            name = -what.number
        if what.ended:
            # Unless the next newest of the key, or its next pause, has replaced it.
            if name in self._live and self._live[name][0] is what:
                self._end(name)
            return
        if self._position > SEGMENT - LONGEST:
            self._turn()
        if isinstance(what, Newest):
            record = encode_newest(what.kept(), self._seed)
        elif isinstance(what, PackedRates):
            record = encode_packed(what.kept(), self._seed)
        elif isinstance(what, KeyPause):
            record = encode_pause(what.kept(), self._seed)
        else:
            record = encode_rate(what.kept(), self._seed)
        self._write(name, what, record)

    def _put(self, hold: Hold) -> None:
        if self._position > SEGMENT - LONGEST:
            self._turn()
        self._write(hold.fence, hold, encode_hold(hold.fields(), self._seed))

    def _write(self, name: Name, what: Change, record: bytes) -> None:
        self._append(record)
        live, size = self._live, len(record)
        old = live.pop(name, None)
        if old is not None:
            self._live_bytes -= old[2]
        live[name] = (what, self._number, size)
        self._live_bytes += size

    def _end(self, name: Name) -> None:
        """Record that something has ended, unless nothing was recorded of it."""
        old = self._live.pop(name, None)
        if old is None:
            return
        self._live_bytes -= old[2]
        if self._position > SEGMENT - LONGEST:
            self._turn()
        self._append(encode_end(name, self._seed))

    def _append(self, record: bytes) -> None:
        end = self._position + len(record)
        self._data[self._position : end] = record
        self._position = end  # after it: else a record would count that was never written

    def _move(self) -> None:
        """Move some of the oldest live records to the end."""
        for _ in range(MOVED):
            item, number, _ = self._first_live()
            # One that ended in this step is left: its own end is still to be written.
            if item is None or number == self._number or item.ended:
                break
            if isinstance(item, Hold):
                self._put(item)
            else:
                self._change(item)

    def _first_live(self) -> tuple[Change | None, int, int]:
        return next(iter(self._live.values()), (None, self._number, 0))

    def _has_too_much(self) -> bool:
        return (self._number - self._oldest) * SEGMENT > 2 * (self._live_bytes + SEGMENT)

    def _turn(self) -> None:
        """Go on in a new segment."""
        number = self._number + 1
        name = name_of(self._generation, number)
        beginning = header(self._identity, self._generation, number, self._fence, SEGMENT)
        file = self._disk.create(name, SEGMENT)
        try:
            mapped = self._disk.map(file, SEGMENT)
        except BaseException:
            self._disk.close(file)
            self._disk.unlink([name])
            raise
        mapped.data[: len(beginning)] = beginning
        position, seed = RECORDS, seed_of(beginning)
        if self._number:
            before, end = self._current, self._position
            if before.end > RECORDS:
                # A step counts as a whole, so all of it goes on in the new segment: else a kill now
                # could keep the end of something, and lose what has come in its place. A step that
                # is longer than a segment cannot.
                step = moved(self._data[before.end : end], seed)
                position += len(step)
                mapped.data[RECORDS:position] = step
                end = before.end
            self._words[END] = word(end, SegmentStage.TURNED)
            before.end = self._ends[self._number] = end
            before.mapped.close()
            # Before it is `_current` no more: see `sync`.
            self._turned.append(before)
            for old in [each for each in self._ends if each < self._first]:
                del self._ends[old]
        self._current = _Segment(number, file, mapped)
        self._data, self._words, self._seed = mapped.data, mapped.words, seed
        self._number, self._position = number, position
        self._is_cleaning = self._has_too_much()

    def _mark(self, where: _Segment, index: int, value: int) -> None:
        data = word(value).to_bytes(WORD, sys.byteorder)
        self._disk.write(where.file, data, index * WORD)
