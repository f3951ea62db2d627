"""The shard of a key, with the vectors of the published algorithm."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.errors import InvalidArgumentError
from dflockd.shards import NUM_SHARDS, get_shard_id
from dflockd.shards.ids import fnv1a32

# key, FNV-1a, of 8192, of 64
HASHED = [
    ("", 0x811C9DC5, 7621, 5),
    ("a", 0xE40C292C, 2348, 44),
    ("foobar", 0xBF9CF968, 6504, 40),
    ("object-123", 0xCD87ADCB, 3531, 11),
    ("exampleObjectID", 0xF3AB5FC3, 8131, 3),
    ("testObject123", 0x1C8BCFDE, 4062, 30),
    ("object1", 0x6AC5BED1, 7889, 17),
    ("object2", 0x67C5BA18, 6680, 24),
    ("user-12345", 0x66746570, 1392, 48),
    ("session-abc-def", 0x2FDD78EC, 6380, 44),
    ("object-with-dashes", 0xE26F4EC4, 3780, 4),
    ("object_with_underscores", 0x2B3C901D, 4125, 29),
    ("object.with.dots", 0xE388C912, 2322, 18),
    ("object/with/slashes", 0x6BFA071D, 1821, 29),
    ("object@with@ats", 0x13C5CB38, 2872, 56),
    ("object#with#hashes", 0xE71DF3F4, 5108, 52),
    ("unicode-测试-test", 0x3BA749CC, 2508, 12),
    ("TestObject-123", 0x2A9BBB2B, 6955, 43),
    ("TestObject-456", 0xD69AD34C, 4940, 12),
    ("regular-object-123", 0x6163D570, 5488, 48),
    ("localhost:7000/object-123", 0x38A71632, 5682, 50),
    ("path/to/object", 0x49F74D50, 3408, 16),
    ("test-migration-obj-0", 0xEB6D27CD, 1997, 13),
    # These only look like fixed shards.
    ("shard#5", 0x90A97077, 4215, 55),
    ("shard#/object", 0xF53338CA, 6346, 10),
    ("shard#-1/object", 0x5896C70C, 1804, 12),
    ("shard#9999/object", 0x825DF65E, 5726, 30),
    ("shard#abc/object", 0xEF0B2A9A, 2714, 26),
    ("shared#5/object", 0xAD4A2E52, 3666, 18),
    ("shard# 5/object", 0x278C0C6F, 3183, 47),
]

FIXED = [
    ("shard#0/object-123", 0),
    ("shard#5/test-object", 5),
    ("shard#63/another-obj", 63),
    ("shard#10/", 10),
    ("shard#42/consistent-object", 42),
    ("shard#5/sub/object", 5),
    ("shard#05/x", 5),
    ("shard#+5/x", 5),
    ("shard#-0/x", 0),
    ("shard#" + "0" * 5000 + "5/x", 5),
]

# What Python's int() takes and Go's Atoi does not, and numbers that no machine integer holds.
NOT_FIXED = [
    "shard# 5/x",
    "shard#5 /x",
    "shard#5\n/x",
    "shard#1_0/x",
    "shard#\u0665/x",
    "shard#\uff15/x",
    "shard#5.5/x",
    "shard#0x5/x",
    "shard#+-5/x",
    "shard#+/x",
    "shard#" + "9" * 5000 + "/x",
    "shard#5x/y",
    "shard#x/5/",
    "Shard#5/x",
    " shard#5/x",
]


def test_there_are_8192_shards():
    assert NUM_SHARDS == 8192


@pytest.mark.parametrize(("key", "hashed", "of_8192", "of_64"), HASHED)
def test_hashed_keys(key, hashed, of_8192, of_64):
    assert fnv1a32(key.encode()) == hashed
    assert get_shard_id(key) == of_8192
    assert get_shard_id(key, 64) == of_64


@pytest.mark.parametrize(("key", "shard"), FIXED)
def test_fixed_shards(key, shard):
    assert get_shard_id(key) == shard
    assert get_shard_id(key, 64) == shard


def test_a_fixed_shard_out_of_range_is_hashed():
    assert get_shard_id("shard#8191/x") == 8191
    assert get_shard_id("shard#8191/x", 64) == 26
    assert get_shard_id("shard#8192/x") == 7067


@pytest.mark.parametrize("key", NOT_FIXED)
def test_what_is_no_decimal_is_hashed(key):
    assert get_shard_id(key) == fnv1a32(key.encode()) % 8192


def test_a_key_can_be_given_as_bytes():
    assert get_shard_id("unicode-测试-test".encode()) == 2508
    assert get_shard_id(b"shard#5/\xff") == 5


def test_without_shards_there_is_no_answer():
    with pytest.raises(InvalidArgumentError, match="num_shards is 0"):
        get_shard_id("a", 0)


def test_ten_thousand_keys_are_spread():
    shards = Counter(get_shard_id(f"object-{n}", 64) for n in range(10_000))
    assert len(shards) == 64
    assert max(shards.values()) < 2 * 10_000 / 64


@given(st.text(), st.integers(1, 10_000))
def test_every_key_has_a_shard_in_range(key, num_shards):
    shard = get_shard_id(key, num_shards)
    assert 0 <= shard < num_shards
    assert shard == get_shard_id(key.encode(), num_shards)


@given(st.integers(0, 8191), st.text())
def test_a_fixed_shard_is_the_shard(shard, rest):
    assert get_shard_id(f"shard#{shard}/{rest}") == shard
