"""Records by themselves: what is decoded is what was encoded, or nothing."""

from __future__ import annotations

import itertools
import struct
import zlib
from array import array
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflockd.storage.journal import LONGEST
from dflockd.storage.records import (
    MUST_BE_KNOWN,
    JournalRecord,
    PausedKey,
    UnknownRecordError,
    decode,
    encode_end,
    encode_hold,
    encode_newest,
    encode_packed,
    encode_pause,
    encode_rate,
)
from dflockd.table import HoldRecord, NewestRecord
from dflockd.table.pauses import NEVER, PauseRecord
from dflockd.table.rates import BLOCK, PackedRecord, RateRecord
from dflockd.wire import MAX_LIMIT, MAX_LINE, MAX_RATE, Space
from dflockd.wire.tokens import MAX_FENCE

SEED = 12345

numbers = st.floats(0, 1e12)
fields = {
    "space": st.sampled_from(Space),
    "key": st.binary(min_size=1, max_size=MAX_LINE),
    "limit": st.integers(0, MAX_LIMIT),
    "fence": st.integers(0, MAX_FENCE),
    "lease": numbers,
    "deadline": numbers,
    "since": numbers,
    "label": st.binary(max_size=MAX_LINE),
}
owners = {
    "owner": st.binary(min_size=1, max_size=64),
    "attempt": st.integers(0, 2**31 - 1),
    "age": st.integers(0, MAX_FENCE),
}
unowned = st.fixed_dictionaries(fields | {"detached": st.booleans()})
owned = st.fixed_dictionaries(fields | owners)
groups = {"group": st.binary(min_size=1, max_size=MAX_LINE), "weight": st.integers(1, MAX_LIMIT)}
places = {"places": st.integers(0, MAX_RATE)}
grouped = st.fixed_dictionaries(fields | owners | groups | places)
holds = (unowned | owned | grouped).map(lambda values: HoldRecord(**values))
newest = st.builds(
    NewestRecord,
    st.binary(min_size=1, max_size=MAX_LINE),
    st.integers(0, MAX_FENCE),
    st.binary(max_size=MAX_LINE),
)
pauses = st.builds(
    PauseRecord,
    st.binary(min_size=1, max_size=MAX_LINE),
    st.binary(max_size=MAX_LINE),
    st.binary(max_size=MAX_LINE),
    numbers,
    numbers | st.just(NEVER),
)
begun = st.lists(st.tuples(numbers, st.integers(1, MAX_RATE).map(float)), max_size=BLOCK)
rates = st.builds(
    RateRecord,
    st.sampled_from(Space),
    st.binary(min_size=1, max_size=MAX_LINE),
    st.integers(1, MAX_RATE),
    numbers,
    st.integers(1, MAX_FENCE),
    begun.map(lambda pairs: tuple(chain.from_iterable(pairs))),
)
paused = st.builds(PausedKey, st.binary(min_size=1, max_size=MAX_LINE))
names = st.integers(-MAX_FENCE, MAX_FENCE) | st.binary(min_size=1, max_size=MAX_LINE) | paused
records = st.lists(holds | newest | rates | pauses | names, max_size=5)


def encoded(record: JournalRecord, seed: int = SEED) -> bytes:
    if isinstance(record, NewestRecord):
        return encode_newest(record, seed)
    if isinstance(record, RateRecord):
        return encode_rate(record, seed)
    if isinstance(record, PauseRecord):
        return encode_pause(record, seed)
    if isinstance(record, int | bytes | PausedKey):
        return encode_end(record, seed)
    return encode_hold(record, seed)


def decoded(data: bytes, end: int | None = None) -> tuple[list[JournalRecord], int]:
    return decode(data, 0, len(data) if end is None else end, SEED)


@given(records)
def test_what_is_decoded_is_what_was_encoded(written: list[JournalRecord]) -> None:
    data = b"".join(map(encoded, written))
    assert decoded(data) == (written, len(data))
    assert decoded(data + bytes(2000)) == (written, len(data))
    assert decoded(data + b"\xff" * 100, len(data)) == (written, len(data))


@given(holds | rates | pauses)
def test_there_is_room_for_every_record(record: HoldRecord | RateRecord | PauseRecord) -> None:
    assert len(encoded(record)) <= LONGEST


@given(records.filter(bool))
def test_what_was_written_elsewhere_is_no_record(written: list[JournalRecord]) -> None:
    data = b"".join(encoded(record, SEED + 1) for record in written)
    assert decoded(data) == ([], 0)


@settings(max_examples=20, deadline=None)
@given(records)
def test_a_record_that_is_cut_short_is_no_record(written: list[JournalRecord]) -> None:
    data = b"".join(map(encoded, written))
    ends = list(itertools.accumulate((len(encoded(record)) for record in written), initial=0))
    for size in range(len(data)):
        whole = max(number for number, end in enumerate(ends) if end <= size)
        assert decoded(data[:size]) == (written[:whole], ends[whole])
        assert decoded(data, size) == (written[:whole], ends[whole])


@settings(max_examples=20, deadline=None)
@given(st.lists(holds | st.integers(0, MAX_FENCE), min_size=1, max_size=3))
def test_a_flipped_bit_never_makes_another_record(written: list[JournalRecord]) -> None:
    data = b"".join(map(encoded, written))
    for bit in range(0, len(data) * 8, 3):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        read, _ = decoded(bytes(flipped))
        assert read == written[: len(read)]
        assert len(read) < len(written)


HOLD = HoldRecord(Space.LOCK, b"key", 1, 7, 30.0, 100.0, 70.0, b"label")


def checked(body: bytes) -> bytes:
    return struct.pack("<IH", zlib.crc32(body, SEED), len(body)) + body


def extended(tag: int) -> bytes:
    """Return the record of a hold of which a later version says one thing more."""
    return checked(encode_hold(HOLD, SEED)[6:] + struct.pack("<BH", tag, 3) + b"new")


def test_what_a_later_version_adds_is_passed_over() -> None:
    assert decoded(extended(MUST_BE_KNOWN - 1))[0] == [HOLD]


@pytest.mark.parametrize("data", [extended(MUST_BE_KNOWN + 1), checked(b"\x63something new")])
def test_what_changes_the_meaning_is_not_passed_over(data: bytes) -> None:
    with pytest.raises(UnknownRecordError, match=r"type (99|129)"):
        decoded(data)


def test_of_packed_rates_that_are_written_again_and_again_the_last_record_is_kept() -> None:
    """There can be a million of them, and sixteen records of each."""
    packs = [
        PackedRecord(
            number, tuple(b"\0%d" % each for each in range(size)), array("d", [1.0] * size)
        )
        for size, number in ((1, 7), (2, 7), (1, 8), (3, 7))
    ]
    data = b"".join(encode_packed(each, SEED) for each in packs) + encode_end(-8, SEED)
    records, end = decoded(data)
    assert records == [-7, -7, packs[2], packs[3], -8]
    assert end == len(data)
