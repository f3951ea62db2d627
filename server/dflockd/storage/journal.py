"""The journal: what the table holds, on disk, so that it outlives the process.

A directory of segments, files of one size that are mapped into memory. To record a change is to copy
some hundred bytes: no system call, no wait. The kernel keeps what was copied whatever becomes of the
process; only the end of the machine can lose it, which `dflockd.storage.directory` knows how to tell.

A record is complete in itself: it says all of a hold, or that one has ended. So what is live can be
moved to the end at any time, and then the oldest segments hold nothing of interest and are deleted.
A few live records are moved with each new one, once there is more on disk than the live ones call
for (the cleaning of a log-structured store; Rosenblum and Ousterhout, 1992): no pause to compact.

Each process writes a generation of its own, and which one counts is said elsewhere (in the state
file), in one step: times on another clock and the torn last record of another process never mix
with what is new.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dflockd.table import Hold, HoldRecord
from dflockd.wire import Space

SEGMENT = 4 << 20
"""Bytes of one segment."""

MOVED = 2
"""How many live records are moved with each new one while there is too much on disk."""

LONGEST = 1024
"""Bytes that no record exceeds: two lines of the protocol and some numbers."""

_HEADER = struct.Struct("<16sQQ")
_MAGIC = b"dflockd journal1"
_PATTERN = "journal-" + "[0-9]" * 8 + "-" + "[0-9]" * 12
_CHECKED = struct.Struct("<IH")
_END = struct.Struct("<BQ")
_HOLD = struct.Struct("<BBQIdddHH")
_IS_END, _IS_HOLD, _IS_DETACHED = 1, 2, 3


class CorruptError(Exception):
    """A segment is not what was written; the text says which and where."""


def encode_hold(kept: HoldRecord) -> bytes:
    """Return the record of a hold that has begun or was extended."""
    space, key, limit, fence, lease, deadline, since, label, detached = kept
    kind = _IS_DETACHED if detached else _IS_HOLD
    body = (
        _HOLD.pack(kind, space, fence, limit, lease, deadline, since, len(key), len(label))
        + key
        + label
    )
    return _CHECKED.pack(zlib.crc32(body), len(body)) + body


def encode_end(fence: int) -> bytes:
    """Return the record of a hold that has ended."""
    body = _END.pack(_IS_END, fence)
    return _CHECKED.pack(zlib.crc32(body), len(body)) + body


def decode(data: bytes, start: int = 0) -> tuple[list[HoldRecord | int], int]:
    """Read records until there are no more.

    Returns:
        The records, an `int` being the fence of a hold that has ended; and the position behind the
        last one. What follows there is zeros, or something else: that is for the caller to judge.
    """
    records: list[HoldRecord | int] = []
    while (body_start := start + _CHECKED.size) <= len(data):
        crc, size = _CHECKED.unpack_from(data, start)
        body = data[body_start : body_start + size]
        if not size or len(body) != size or zlib.crc32(body) != crc:
            break
        start = body_start + size
        if body[0] == _IS_END:
            records.append(_END.unpack(body)[1])
            continue
        kind, space, fence, limit, lease, deadline, since, key_size, _ = _HOLD.unpack_from(body)
        key_end = _HOLD.size + key_size
        key, label = body[_HOLD.size : key_end], body[key_end:]
        detached = kind == _IS_DETACHED
        records.append(
            HoldRecord(Space(space), key, limit, fence, lease, deadline, since, label, detached)
        )
    return records, start


class Restored(NamedTuple):
    """What a journal says of the end of its time."""

    holds: list[HoldRecord]
    fence: int
    """The largest fence that it knows to have been given out."""


def any_in(directory: Path) -> bool:
    """Whether there are segments of any generation."""
    return any(directory.glob(_PATTERN))


class Journal:
    """One generation of the journal in a directory: what one process writes.

    Args:
        directory: where the segments are, and nothing else of that name.
        generation: its number, from 1.
    """

    def __init__(self, directory: Path, generation: int) -> None:
        self._directory = directory
        self._prefix = f"journal-{generation:08d}-"
        self._live: OrderedDict[int, tuple[Hold, int, int]] = OrderedDict()
        """By fence: the hold, and number of the segment and size of its latest record."""
        self._live_bytes = 0
        self._number = 0
        self._oldest = 1
        self._is_cleaning = False
        self._fence = 0
        self._map: mmap.mmap | None = None
        self._position = 0

    @property
    def segments(self) -> int:
        """How many files it has."""
        return self._number - self._oldest + 1

    @property
    def live_size(self) -> int:
        """Bytes of it that count: the latest record of each hold."""
        return self._live_bytes

    # What an earlier process has left.

    @property
    def exists(self) -> bool:
        """Whether there are segments."""
        return bool(self._segments())

    def read(self, *, strict: bool) -> Restored:
        """Return what the segments say.

        Args:
            strict: whether the kernel has kept all that was written, so that anything wrong in them
                is damage. The end of the process can cut short what it wrote last, even so.

        Raises:
            CorruptError: there is damage.
            OSError: they cannot be read.
        """
        holds: dict[int, HoldRecord] = {}
        highest, expected = 0, 0
        paths = self._segments()
        for path in paths:
            is_last = path is paths[-1]
            number = _number(path)
            if strict and expected and number != expected:
                raise CorruptError(f"{path}: the segment before it is missing")
            expected = number + 1
            data = path.read_bytes()
            fence = _read_header(data, number)
            if fence is None:
                if strict and not (is_last and _is_blank(data, _HEADER.size)):
                    raise CorruptError(f"{path}: not the segment that should be there")
                continue
            records, position = decode(data, _HEADER.size)
            if strict and not _is_blank(data, position + LONGEST if is_last else position):
                raise CorruptError(f"{path}: damaged at byte {position}")
            highest = max(highest, fence)
            for record in records:
                if isinstance(record, int):
                    holds.pop(record, None)
                else:
                    highest = max(highest, record.fence)
                    holds[record.fence] = record
        return Restored(list(holds.values()), highest)

    # What this process writes.

    def start(self, holds: Iterable[Hold], fence: int) -> None:
        """Begin with what a table holds.

        Args:
            holds: all that are in it.
            fence: the last one that was given out.

        Raises:
            OSError: there is no room, or no permission.
        """
        for path in self._segments():
            path.unlink()  # of a process that ended before its generation counted
        self._fence = fence
        self._turn()
        for hold in holds:
            self._put(hold)

    def record(self, changes: Iterable[Hold], fence: int) -> None:
        """Write down holds that have begun, been extended or ended.

        Args:
            changes: as `LockTable.changes` lists them.
            fence: the last one that was given out.

        Raises:
            OSError: there is no room for another segment. Nothing may be granted then.
        """
        self._fence = fence
        for hold in changes:
            if not hold.ended:
                self._put(hold)
            elif hold.fence in self._live:
                self._forget(hold.fence)
                self._write(encode_end(hold.fence))
            if self._is_cleaning:
                self._move()
        if self._is_cleaning:
            self._drop_old()

    def drop_others(self) -> None:
        """Delete the segments of all other generations.

        Raises:
            OSError: they cannot be deleted.
        """
        for path in sorted(self._directory.glob(_PATTERN)):
            if not path.name.startswith(self._prefix):
                path.unlink()

    def close(self) -> None:
        """Let everything reach the disk.

        Raises:
            OSError: it did not.
        """
        if self._map is not None:
            self._map.flush()
            self._map.close()
            self._map = None
        for path in [*self._segments(), self._directory]:
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def _put(self, hold: Hold) -> None:
        record = encode_hold(hold.kept())
        if hold.fence in self._live:
            self._forget(hold.fence)
        self._write(record)
        self._live[hold.fence] = (hold, self._number, len(record))
        self._live_bytes += len(record)

    def _forget(self, fence: int) -> None:
        self._live_bytes -= self._live.pop(fence)[2]

    def _write(self, record: bytes) -> None:
        end = self._position + len(record)
        if self._map is None or end > SEGMENT:
            self._turn()
            end = self._position + len(record)
        assert self._map is not None
        self._map[self._position : end] = record
        self._position = end

    def _move(self) -> None:
        """Move some of the oldest live records to the end."""
        for _ in range(MOVED):
            hold, number, _ = self._first_live()
            # One that ended in this step is left: its own end is still to be written.
            if hold is None or number == self._number or hold.ended:
                break
            self._put(hold)

    def _drop_old(self) -> None:
        """Delete the segments in which nothing lives."""
        number = self._first_live()[1]
        if number > self._oldest:
            for path in self._segments():
                if _number(path) < number:
                    path.unlink()
            self._oldest = number
        self._is_cleaning = self._has_too_much()

    def _first_live(self) -> tuple[Hold | None, int, int]:
        return next(iter(self._live.values()), (None, self._number, 0))

    def _has_too_much(self) -> bool:
        return (self._number - self._oldest) * SEGMENT > 2 * (self._live_bytes + SEGMENT)

    def _turn(self) -> None:
        """Go on in a new segment."""
        number = self._number + 1
        path = self._directory / f"{self._prefix}{number:012d}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # All of it now: a hole that cannot be filled later would end the process.
            _allocate(file, SEGMENT)
            segment = mmap.mmap(file, SEGMENT)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(file)
        segment[: _HEADER.size] = _HEADER.pack(_MAGIC, number, self._fence)
        if self._map is not None:
            self._map.close()
        self._map, self._number, self._position = segment, number, _HEADER.size
        self._is_cleaning = self._has_too_much()

    def _segments(self) -> list[Path]:
        return sorted(self._directory.glob(self._prefix + "[0-9]" * 12))


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _read_header(data: bytes, number: int) -> int | None:
    """Return the last fence that was given out before a segment, or ``None`` if it is not one."""
    if len(data) < _HEADER.size:
        return None
    magic, written, fence = _HEADER.unpack_from(data)
    return fence if magic == _MAGIC and written == number else None


def _is_blank(data: bytes, start: int) -> bool:
    return data.count(0, start) == max(0, len(data) - start)


def _allocate(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as exc:
            if exc.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
        else:
            return
    written = 0
    while written < size:
        written += os.pwrite(file, bytes(size - written), written)
