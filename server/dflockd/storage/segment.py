"""One file of the journal: how it begins, and how much of it counts.

```
 0  magic and version     16 bytes
16  identity              16 bytes: of the directory
32  generation             8 bytes
40  number                 8 bytes
48  fence                  8 bytes: the last one given out before it
56  size                   4 bytes: of the file
60  checksum               4 bytes: of all above, and where the checksums of its records begin
64  end                    8 bytes: how far records count, and whether another segment follows
72  synced                 8 bytes: how much of that is on the disk for certain
80  first                  8 bytes: number of the oldest segment that counts
88  nothing yet           40 bytes
128 records
```

The three words change as the journal is written, each in one step, and each is followed by its own
complement: a byte that has changed by itself makes none of them another number.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import Final, NamedTuple

from dflockd.storage.records import JournalRecord, decode

MAGIC = b"dflockd journal2"

RECORDS: Final = 128
"""Where the records begin."""

# Which word of the file is which, in units of eight bytes.
END: Final = 8
SYNCED: Final = 9
FIRST: Final = 10

WORD = 8
"""Bytes of a word."""

_HEADER = struct.Struct("<16s16sQQQI")
_CHECKSUM = struct.Struct("<I")
# As `Mapped.words` writes them.
_WORDS = struct.Struct("=QQQ")
LOW: Final = (1 << 32) - 1
NOTHING: Final = LOW << 32
_VALUE = (1 << 30) - 1


class SegmentStage(IntEnum):
    """How far a segment is: part of its word for the end."""

    OPEN = 0
    """The journal goes on in it."""
    TURNED = 1
    """The journal has gone on in the next one."""
    CLOSED = 2
    """The journal ended in it, with a clean stop."""


def word(value: int, stage: int = 0) -> int:
    """Return a number of up to 30 bits, and a stage, as they stand in a segment."""
    # The complement of a number of 32 bits is what it lacks to the largest.
    return NOTHING - (value | stage << 30) * LOW


def _value(found: int) -> tuple[int, int] | None:
    """Return the number and the stage that a word stands for, or ``None`` if it is none."""
    low = found & LOW
    is_sound = found >> 32 == low ^ LOW and low >> 30 <= max(SegmentStage)
    return (low & _VALUE, low >> 30) if is_sound else None


def header(identity: bytes, generation: int, number: int, fence: int, size: int) -> bytes:
    """Return the beginning of a segment that has no records yet."""
    fixed = _HEADER.pack(MAGIC, identity, generation, number, fence, size)
    words = _WORDS.pack(word(RECORDS), word(0), word(0))
    return fixed + _CHECKSUM.pack(zlib.crc32(fixed)) + words


def seed_of(beginning: bytes) -> int:
    """Return where the checksums of a segment's records begin."""
    seed: int = _CHECKSUM.unpack_from(beginning, _HEADER.size)[0]
    return seed


class Content(NamedTuple):
    """What was found in a segment."""

    fence: int
    flaw: int | None
    """Where it is certainly not what was written; its end may not be known then."""
    stage: SegmentStage
    end: int
    """How far records count."""
    synced: int
    """How much of it must be whole whatever has happened to the machine."""
    first: int
    """Number of the oldest segment that counts, as far as this one knows; 0 if it does not."""
    records: list[JournalRecord]
    whole: int
    """How far the records are whole: up to `end`, or less."""


def parse(data: bytes, identity: bytes, generation: int, number: int) -> Content | None:
    """Return what is in a segment, or ``None`` if it is not the one that it should be.

    Raises:
        UnknownRecordError: it was written by a later version.
    """
    if len(data) < RECORDS:
        return None
    magic, found_identity, found_generation, found_number, fence, size = _HEADER.unpack_from(data)
    seed = seed_of(data)
    if zlib.crc32(data[: _HEADER.size]) != seed or magic != MAGIC:
        return None
    if (found_identity, found_generation, found_number) != (identity, generation, number):
        return None
    flaw = None if len(data) == size else min(len(data), size)
    values = []
    for index, found in enumerate(_WORDS.unpack_from(data, END * WORD), END):
        value = _value(found)
        if value is None:
            flaw = index * WORD
        values.append(value)
    end, stage = values[0] or (RECORDS, SegmentStage.OPEN)
    synced, first = (value[0] if value is not None else 0 for value in values[1:])
    records, whole = decode(data, RECORDS, min(end, len(data)), seed)
    return Content(fence, flaw, SegmentStage(stage), end, synced, first, records, whole)
