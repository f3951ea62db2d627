"""The journal as version 0.1 wrote it, to be read once: the next start writes the present format.

It has no identity, no end and no seal, so that less of its damage can be told; what can be told is
refused. A segment is a header and records; behind the last record stand zeros, or in the last segment
of a process that was killed one record that is not whole.
"""

from __future__ import annotations

import struct
import zlib

from dflockd.storage.disk import Disk
from dflockd.storage.reading import (
    DamagedError,
    Restored,
    Trust,
    names_of,
    number_of,
    restored,
)
from dflockd.storage.records import Record
from dflockd.table import HoldRecord
from dflockd.wire import Space

SEGMENT = 4 << 20
"""Bytes of one segment."""

LONGEST = 1024
"""Bytes that no record exceeds."""

_HEADER = struct.Struct("<16sQQ")
_MAGIC = b"dflockd journal1"
_FENCE = 24
_CHECKED = struct.Struct("<IH")
_END = struct.Struct("<BQ")
_HOLD = struct.Struct("<BBQIdddHH")
_IS_END, _IS_DETACHED = 1, 3


def read(disk: Disk, generation: int, trust: Trust, ceiling: int) -> Restored:
    """Return what the segments say.

    Args:
        disk: where they are.
        generation: which of them count.
        trust: how they were left.
        ceiling: a fence beyond all that were given out: it was not checked in the header.

    Raises:
        DamagedError: there is damage, and `trust` says that there should be none.
        OSError: they cannot be read.
    """
    is_whole = trust in (Trust.CLOSED, Trust.KEPT)
    segments: list[tuple[int, list[Record]]] = []
    expected = 0
    names = disk.names(names_of(generation))
    if is_whole and not names:
        raise DamagedError(f"{disk.path}: the segments of generation {generation} are missing")
    for name in names:
        path, is_last, number = disk.path / name, name == names[-1], number_of(name)
        if is_whole and expected and number != expected:
            raise DamagedError(f"{path}: the segment before it is missing")
        expected = number + 1
        data = disk.read(name)
        fence = _fence(data, number)
        if fence is None:
            if is_whole and not (is_last and number > 1 and _is_blank(data, _HEADER.size)):
                raise DamagedError(f"{path}: damaged at byte 0")
            continue
        records, position = _decode(data)
        may_be_torn = is_last and trust is Trust.KEPT
        if is_whole and not _is_blank(data, position + LONGEST if may_be_torn else position):
            raise DamagedError(f"{path}: damaged at byte {position}")
        if is_whole and fence > ceiling:
            raise DamagedError(f"{path}: damaged at byte {_FENCE}")
        if is_whole and len(data) != SEGMENT:
            raise DamagedError(f"{path}: damaged at byte {len(data)}")
        segments.append((fence if fence <= ceiling else 0, records))
    return restored(segments)


def _decode(data: bytes) -> tuple[list[Record], int]:
    records: list[Record] = []
    start = _HEADER.size
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
        records.append(
            HoldRecord(
                *(Space(space), key, limit, fence, lease, deadline, since, label),
                kind == _IS_DETACHED,
            )
        )
    return records, start


def _fence(data: bytes, number: int) -> int | None:
    """Return the last fence that was given out before a segment, or ``None`` if it is not one."""
    if len(data) < _HEADER.size:
        return None
    magic, written, fence = _HEADER.unpack_from(data)
    return fence if magic == _MAGIC and written == number else None


def _is_blank(data: bytes, start: int) -> bool:
    return data.count(0, start) == max(0, len(data) - start)
