"""Records of the journal: that a hold is so and so, or has ended; the newest of keys; runs; pauses.

A record is a checksum, its length and a body; a body is its type, then the fields of that type, then
any number of extra fields, each with a tag and a length. So a later version can say more of a hold,
and a reader knows what it does not know.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from typing import Final, NamedTuple, TypeAlias

from dflockd.table import HoldRecord, NewestRecord
from dflockd.table.pauses import PauseRecord
from dflockd.table.rates import PackedRecord, RateRecord
from dflockd.table.state import HoldFields
from dflockd.wire import Space

_CHECKED: Final = struct.Struct("<IH")
_END: Final = struct.Struct("<BQ")
_HOLD: Final = struct.Struct("<BBQIdddBHH")
_EXTRA: Final = struct.Struct("<BH")
_ATTEMPT: Final = struct.Struct("<I")
_AGE: Final = struct.Struct("<Q")
_WEIGHT: Final = struct.Struct("<I")
_PLACES: Final = struct.Struct("<I")
_NEWEST: Final = struct.Struct("<BQHH")
_RATE: Final = struct.Struct("<BBQIdHH")
_PACKED: Final = struct.Struct("<BQHH")
_RATE_END: Final = struct.Struct("<BQ")
_NEWEST_END: Final = struct.Struct("<BH")
_PAUSE: Final = struct.Struct("<BddHHH")
_PAUSE_END: Final = struct.Struct("<BH")

_IS_END: Final = 1
_IS_HOLD: Final = 2
_IS_NEWEST: Final = 3
_IS_RATE: Final = 4
_IS_RATE_END: Final = 5
_IS_NEWEST_END: Final = 6
_IS_PACKED: Final = 7
_IS_PAUSE: Final = 8
_IS_PAUSE_END: Final = 9
_DETACHED: Final = 1
"""A flag of a hold."""

_OWNER: Final = 1
"""Tag of the extra field that says which run holds it: the attempt, then the id."""

_HAS_AGE: Final = 2
"""Tag of the extra field that says the age of that run."""

_PENDING: Final = 3
"""Tag of the extra field that says how many places of a rate the run takes that has yet to begin."""

_GROUP: Final = 4
"""Tag of the extra field that says to which group its holder belongs."""

MUST_BE_KNOWN = 128
"""Tags from here on change what a hold is: a reader that does not know them must not go on."""

_HAS_WEIGHT: Final = 128
"""Tag of the extra field that says how many slots it takes, if that is more than one."""


class PausedKey(NamedTuple):
    """The name of a pause."""

    key: bytes


Name: TypeAlias = int | bytes | PausedKey
"""What a record is about: the fence of a hold, the key of a newest or of a pause, or the number of some
beginnings of a rate, below 0. An age is no name: it comes from outside, and may be of another key."""

JournalRecord: TypeAlias = (
    HoldRecord | NewestRecord | RateRecord | PackedRecord | PauseRecord | Name
)
"""See `decode`."""


class UnknownRecordError(Exception):
    """A whole record of a type, or with a field, that only a later version knows."""


def encode_hold(record: HoldFields, seed: int) -> bytes:
    """Return the record of a hold that has begun or was extended.

    Args:
        record: what there is to say of it, a `HoldRecord` or the same without its names.
        seed: the checksum of what stands above: a record that has come from elsewhere is no record.
    """
    (
        space,
        key,
        limit,
        fence,
        lease,
        deadline,
        since,
        label,
        detached,
        owner,
        attempt,
        age,
        places,
        group,
        weight,
    ) = record
    flags = _DETACHED if detached else 0
    body = (
        _HOLD.pack(
            _IS_HOLD, space, fence, limit, lease, deadline, since, flags, len(key), len(label)
        )
        + key
        + label
    )
    if owner:
        body += _EXTRA.pack(_OWNER, _ATTEMPT.size + len(owner)) + _ATTEMPT.pack(attempt) + owner
    if age:
        body += _EXTRA.pack(_HAS_AGE, _AGE.size) + _AGE.pack(age)
    if places:
        body += _EXTRA.pack(_PENDING, _PLACES.size) + _PLACES.pack(places)
    if group:
        body += _EXTRA.pack(_GROUP, len(group)) + group
    if weight > 1:
        body += _EXTRA.pack(_HAS_WEIGHT, _WEIGHT.size) + _WEIGHT.pack(weight)
    return _CHECKED.pack(zlib.crc32(body, seed), len(body)) + body


def encode_newest(record: NewestRecord, seed: int) -> bytes:
    """Return the record of the newest of a key."""
    key, age, label = record
    body = _NEWEST.pack(_IS_NEWEST, age, len(key), len(label)) + key + label
    return _CHECKED.pack(zlib.crc32(body, seed), len(body)) + body


def encode_end(name: Name, seed: int) -> bytes:
    """Return the record that something has ended, or is of no more use."""
    if isinstance(name, int):  # nearly always
        body = _END.pack(_IS_END, name) if name >= 0 else _RATE_END.pack(_IS_RATE_END, -name)
    elif isinstance(name, bytes):
        body = _NEWEST_END.pack(_IS_NEWEST_END, len(name)) + name
    else:
        body = _PAUSE_END.pack(_IS_PAUSE_END, len(name.key)) + name.key
    return _CHECKED.pack(zlib.crc32(body, seed), len(body)) + body


def encode_rate(record: RateRecord, seed: int) -> bytes:
    """Return the record of some beginnings of a rate."""
    space, key, runs, window, number, begun = record
    body = _RATE.pack(_IS_RATE, space, number, runs, window, len(key), len(begun)) + key
    body += array("d", begun).tobytes()
    return _CHECKED.pack(zlib.crc32(body, seed), len(body)) + body


def encode_pause(record: PauseRecord, seed: int) -> bytes:
    """Return the record of the pause of a key."""
    key, by, reason, since, until = record
    body = _PAUSE.pack(_IS_PAUSE, since, until, len(key), len(by), len(reason)) + key + by + reason
    return _CHECKED.pack(zlib.crc32(body, seed), len(body)) + body


def encode_packed(record: PackedRecord, seed: int) -> bytes:
    """Return the record of some rates that rest."""
    number, names, numbers = record
    lengths = array("H", [len(name) for name in names]).tobytes()
    body = _PACKED.pack(_IS_PACKED, number, len(names), len(numbers)) + lengths
    body += b"".join(names) + numbers.tobytes()
    return _CHECKED.pack(zlib.crc32(body, seed), len(body)) + body


def moved(records: bytes, seed: int) -> bytes:
    """Return whole records as they stand where checksums begin with another seed."""
    result, start = bytearray(records), 0
    while start < len(records):
        _, size = _CHECKED.unpack_from(records, start)
        body_start = start + _CHECKED.size
        body = records[body_start : body_start + size]
        _CHECKED.pack_into(result, start, zlib.crc32(body, seed), size)
        start = body_start + size
    return bytes(result)


def decode(data: bytes, start: int, end: int, seed: int) -> tuple[list[JournalRecord], int]:
    """Read records until one is not whole.

    Args:
        data: the bytes that they are in.
        start: where the first one begins.
        end: where the last one should end.
        seed: as they were written with.

    Returns:
        The records, a `Name` being that of something that has ended, or of rates of which there is a
        later record; and the position behind the last one, which is `end` if all of them are whole.

    Raises:
        UnknownRecordError: one is of a later version.
    """
    records: list[JournalRecord] = []
    packed: dict[int, tuple[int, bytes]] = {}
    """Where the last record of some rates is, and what. It is written anew for each rate that joins
    them: of all these but the last there is nothing to know than that they have ended."""
    while (body_start := start + _CHECKED.size) <= end:
        crc, size = _CHECKED.unpack_from(data, start)
        body = data[body_start : body_start + size]
        if not size or body_start + size > end or zlib.crc32(body, seed) != crc:
            break
        if body[0] == _IS_PACKED:
            number = int(_PACKED.unpack_from(body)[1])
            packed[number] = len(records), body
            records.append(-number)
        else:
            records.append(_read(body))
        start = body_start + size
    for at, body in packed.values():
        records[at] = _read_packed(body)
    return records, start


def _read(body: bytes) -> JournalRecord:
    kind = body[0]
    if kind == _IS_END:
        return int(_END.unpack_from(body)[1])
    if kind == _IS_NEWEST:
        _, age, key_size, label_size = _NEWEST.unpack_from(body)
        key_end = _NEWEST.size + key_size
        key, label = body[_NEWEST.size : key_end], body[key_end : key_end + label_size]
        return NewestRecord(key, age, label)
    if kind == _IS_RATE:
        return _read_rate(body)
    if kind == _IS_RATE_END:
        return -int(_RATE_END.unpack_from(body)[1])
    if kind == _IS_NEWEST_END:
        return body[_NEWEST_END.size : _NEWEST_END.size + _NEWEST_END.unpack_from(body)[1]]
    if kind == _IS_PAUSE:
        _, since, until, key_size, by_size, reason_size = _PAUSE.unpack_from(body)
        key_end = _PAUSE.size + key_size
        by_end = key_end + by_size
        key, by = body[_PAUSE.size : key_end], body[key_end:by_end]
        return PauseRecord(key, by, body[by_end : by_end + reason_size], since, until)
    if kind == _IS_PAUSE_END:
        size = _PAUSE_END.unpack_from(body)[1]
        return PausedKey(body[_PAUSE_END.size : _PAUSE_END.size + size])
    if kind != _IS_HOLD:
        raise UnknownRecordError(f"a record of type {kind}")
    (_, space, fence, limit, lease, deadline, since, flags, key_size, label_size) = (
        _HOLD.unpack_from(body)
    )
    key_end = _HOLD.size + key_size
    end = key_end + label_size
    key, label = body[_HOLD.size : key_end], body[key_end:end]
    owner, attempt, age, places, group, weight = b"", 0, 0, 0, b"", 1
    while end < len(body):
        tag, size = _EXTRA.unpack_from(body, end)
        content = body[end + _EXTRA.size : end + _EXTRA.size + size]
        end += _EXTRA.size + size
        if tag == _OWNER:
            (attempt,), owner = _ATTEMPT.unpack_from(content), content[_ATTEMPT.size :]
        elif tag == _HAS_AGE:
            (age,) = _AGE.unpack_from(content)
        elif tag == _PENDING:
            (places,) = _PLACES.unpack_from(content)
        elif tag == _GROUP:
            group = content
        elif tag == _HAS_WEIGHT:
            (weight,) = _WEIGHT.unpack_from(content)
        elif tag >= MUST_BE_KNOWN:
            raise UnknownRecordError(f"a record with a field of type {tag}")
    return HoldRecord(
        Space(space),
        key,
        limit,
        fence,
        lease,
        deadline,
        since,
        label,
        bool(flags & _DETACHED),
        owner,
        attempt,
        age,
        places,
        group,
        weight,
    )


def _read_rate(body: bytes) -> RateRecord:
    _, space, number, runs, window, key_size, count = _RATE.unpack_from(body)
    key_end = _RATE.size + key_size
    begun = array("d")
    begun.frombytes(body[key_end : key_end + count * begun.itemsize])
    key = body[_RATE.size : key_end]
    return RateRecord(space, key, runs, window, number, tuple(begun))


def _read_packed(body: bytes) -> PackedRecord:
    _, number, count, size = _PACKED.unpack_from(body)
    lengths, numbers, names = array("H"), array("d"), []
    at = _PACKED.size + count * lengths.itemsize
    lengths.frombytes(body[_PACKED.size : at])
    for length in lengths:
        names.append(body[at : at + length])
        at += length
    numbers.frombytes(body[at : at + size * numbers.itemsize])
    return PackedRecord(number, tuple(names), numbers)
