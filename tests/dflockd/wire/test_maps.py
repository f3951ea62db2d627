"""The map of a cluster on the wire: plain, packed, and known by its version."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.wire import Report, Shards, Status, decode_map, encode_map
from dflockd.wire.maps import MAX_MAP, BadMapError

documents = st.builds(
    lambda servers, shards: {
        "num_shards": len(shards),
        "servers": servers,
        "shards": [index for index, _ in shards],
        "epochs": [epoch for _, epoch in shards],
    },
    st.lists(st.sampled_from(["a:1", "b:6388", "10.0.0.1:6388", "lock-1.internal:1"]), max_size=4),
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, (1 << 24) - 1)), max_size=40),
)

MAP: dict[str, Any] = {"num_shards": 1, "servers": ["a:1"], "shards": [0], "epochs": [7]}


def packed(text: bytes, version: object = "0af3") -> Report:
    packed = b64encode(zlib.compress(text)).decode()
    return Report(json.dumps({"version": version, "zlib": packed}).encode())


@given(documents)
def test_a_map_is_read_as_it_was_sent_either_way(document: dict[str, Any]) -> None:
    report = encode_map(document)
    plain, version = decode_map(report.plain)
    assert version == report.version
    assert plain == {"version": version.decode(), **document}
    assert decode_map(report.packed) == (document, version)


@given(documents, documents)
def test_the_version_says_whether_two_maps_are_the_same(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert (encode_map(one).version == encode_map(other).version) is (one == other)
    assert encode_map(json.loads(json.dumps(one))).version == encode_map(one).version


def test_every_entry_counts_for_the_version() -> None:
    shards = list(range(-1, 40))
    whole = {"servers": [f"{n}:1" for n in range(40)], "shards": shards, "epochs": shards}
    changed = [
        {**whole, name: [*entries[:number], entries[number - 1], *entries[number + 1 :]]}
        for name, entries in whole.items()
        for number in range(len(entries))
    ]
    versions = {encode_map(each).version for each in [whole, *changed]}
    assert len(versions) == 1 + len(changed)


def test_what_is_answered() -> None:
    report = encode_map(MAP)
    assert report.answer(Shards()) is report.plain
    assert report.answer(Shards(packed=True)) is report.packed
    assert report.answer(Shards(report.version)) is Status.OK
    assert report.answer(Shards(report.version, packed=True)) is Status.OK
    for version in (b"at", report.version.upper() + b"x", report.version[:-1], b"\xff"):
        assert report.answer(Shards(version)) is report.plain
        assert report.answer(Shards(version, packed=True)) is report.packed


def test_a_map_of_0_1_has_no_version() -> None:
    assert decode_map(Report(json.dumps(MAP).encode())) == (MAP, b"")


@pytest.mark.parametrize("version", ["", "a b", "a\nl\nkey\n0", "é", "x" * 65, 7, None, ["a"]])
def test_a_version_that_could_not_be_sent_is_none(version: object) -> None:
    assert decode_map(Report(json.dumps(MAP | {"version": version}).encode()))[1] == b""
    assert decode_map(packed(json.dumps(MAP).encode(), version)) == (MAP, b"")


@pytest.mark.parametrize(
    "report",
    [
        *map(
            Report,
            [b"", b"{", b"[]", b"\xff", b'{"zlib": 7}', b'{"zlib": "?"}', b'{"zlib": "\xc3\xa9"}'],
        ),
        Report(b'{"zlib": ""}'),
        Report(b'{"zlib": "AAAA"}'),
        packed(b"[]"),
        packed(b"{"),
        packed(b'{"zlib": "AAAA"}'[:-1]),
        Report(b'{"a":' * 100_000),
        packed(b" " * MAX_MAP + b"{}"),
    ],
)
def test_what_is_no_map_is_refused(report: Report) -> None:
    with pytest.raises(BadMapError):
        decode_map(report)


def test_what_is_cut_off_is_refused() -> None:
    whole = json.loads(encode_map(MAP).packed.json)["zlib"]
    for end in range(0, len(whole), 4):
        with pytest.raises(BadMapError):
            decode_map(Report(json.dumps({"zlib": whole[:end]}).encode()))
