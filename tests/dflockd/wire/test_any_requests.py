"""Any request is read as it was sent, and any bytes at all have a defined answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from dflockd.wire import (
    MAX_AGE,
    MAX_ATTEMPT,
    MAX_LIMIT,
    MAX_LINE,
    MAX_RATE,
    MAX_SECONDS,
    Acquire,
    Auth,
    Barrier,
    DrawAge,
    Enqueue,
    Evict,
    FairGroup,
    Find,
    Hello,
    How,
    Identify,
    Inspect,
    Listen,
    Malformed,
    Owner,
    Pass,
    Pause,
    Ping,
    Rate,
    Release,
    Renew,
    Request,
    Reserve,
    Resume,
    Shards,
    Space,
    StableRef,
    Stats,
    Unbegun,
    Wait,
    encode_request,
    fence_from_token,
    format_token,
    key_problem,
)
from tests.dflockd.wire.frames import FRAMES, LOCK, SEMAPHORE, named, pieces, read, text

keys = st.text(min_size=1, max_size=60).map(str.encode).filter(lambda key: not key_problem(key))

keys = keys | st.integers(1, MAX_LINE).map(lambda length: b"k" * length)

seconds = st.integers(0, MAX_SECONDS)

leases = st.none() | st.integers(1, MAX_SECONDS)

limits = st.integers(1, MAX_LIMIT)

tokens = st.integers(0, 2**64 - 1).map(lambda fence: format_token(fence, b"\x01\xab" * 4))

spaces = st.sampled_from(Space)

tickets = st.from_regex(rb"[0-9A-Za-z]{1,64}", fullmatch=True)

names = st.from_regex(rb"[!-~]{1,64}", fullmatch=True)

ages = st.integers(1, MAX_AGE)

owners = st.none() | st.builds(Owner, names, st.integers(0, MAX_ATTEMPT), st.just(0) | ages)

labels = st.text(max_size=60).filter(str.isprintable).map(str.encode)

labels = labels | labels.map(lambda label: label + b" label=x limit=3 secret=y")

bys = labels.map(lambda label: label.replace(b" ", b"-"))

rates = st.none() | st.builds(Rate, st.integers(1, MAX_RATE), st.integers(1, MAX_SECONDS))

weights = st.just(1) | st.integers(1, MAX_LIMIT)

shares = st.integers(2, MAX_LIMIT).map(lambda weight: FairGroup(b"", 0, weight))

groups = st.none() | st.builds(FairGroup, keys, st.integers(0, MAX_LIMIT), weights) | shares

reserves = st.none() | st.builds(Reserve, seconds, seconds)

maybe_tickets = st.just(b"") | tickets

whole = (leases, rates, owners, labels, groups, maybe_tickets)
"""What an `Acquire` and an `Enqueue` say."""


def made(message: Callable[..., Request], *parts: SearchStrategy[Any]) -> SearchStrategy[Request]:
    """Return requests of these parts alone: `st.builds` would add what has a default."""
    return st.tuples(*parts).map(lambda drawn: message(*drawn))


def of_a_slot(
    message: Callable[..., Request], *parts: SearchStrategy[Any]
) -> SearchStrategy[Request]:
    """The same of those who may have a weight: then the limit is more than one."""

    def is_sendable(request: Request) -> bool:
        assert isinstance(request, Acquire | Enqueue)
        return request.limit > 1 or request.group is None or request.group.weight == 1

    return made(message, *parts).filter(is_sendable)


requests_ = st.one_of(
    made(Acquire, st.just(SEMAPHORE), keys, limits, seconds, leases),
    made(Enqueue, st.just(SEMAPHORE), keys, limits, leases),
    made(Acquire, st.just(LOCK), keys, st.just(1), seconds, leases),
    of_a_slot(Acquire, st.just(LOCK), keys, limits, seconds, *whole, reserves),
    of_a_slot(Enqueue, st.just(LOCK), keys, limits, *whole, st.none() | seconds),
    made(Wait, spaces, keys, seconds),
    made(Wait, st.just(LOCK), keys, seconds, reserves, st.just(0) | ages),
    made(Release, spaces, keys, tokens),
    made(Renew, spaces, keys, tokens, leases),
    made(Renew, st.just(LOCK), keys, tokens, leases, st.sampled_from(How), owners, labels, groups),
    made(Unbegun, keys, tokens),
    made(Hello, names, names, st.none() | text),
    made(Auth, text),
    made(StableRef, names),
    st.sampled_from([Stats(), Ping(), Barrier()]),
    made(Inspect, spaces, keys),
    made(Find, labels, st.booleans(), st.booleans()),
    made(Evict, spaces, keys, st.integers(0, 2**64 - 1)),
    made(Pause, keys, st.none() | st.integers(1, MAX_SECONDS), bys, labels),
    made(Resume, keys),
    made(Shards, st.just(b"") | tickets, st.booleans()),
    made(Identify, tickets),
    made(Pass, keys, tickets),
    made(DrawAge, keys),
    made(Listen, keys, tokens),
)

streams = st.lists(pieces, max_size=40).map(b"".join) | st.binary(max_size=400)


def check_stream(stream: bytes, cuts: list[int]) -> None:
    whole, whole_gave_up = read(stream)
    assert all(type(request).__name__ in ANSWERS for request in whole)
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    found, gave_up = read(*[stream[a:b] for a, b in pairwise(edges)])
    # The types too: a request without fields equals any other.
    assert [(type(request), request) for request in found] == [(type(r), r) for r in whole]
    assert gave_up == whole_gave_up


ANSWERS = {type(request).__name__ for _, request in FRAMES} | {"Malformed"}


# Any request, any bytes, any cut.


@given(text.filter(lambda line: b"\r\n" not in line))
def test_nothing_is_wrong_about_the_version_of_a_map(argument: bytes) -> None:
    found, _ = read(b"shards\n_\n%b\n" % argument)
    assert [type(request) for request in found] == [Shards]


@given(st.lists(requests_, max_size=8), st.lists(st.integers(0, 10_000), max_size=6))
def test_what_is_sent_is_read(sent: list[Request], cuts: list[int]) -> None:
    stream = b"".join(encode_request(request) for request in sent)
    found, gave_up = read(stream)
    assert found == sent
    assert [type(request) for request in found] == [type(request) for request in sent]
    assert not gave_up
    check_stream(stream, cuts)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(streams, st.lists(st.integers(0, 70_000), max_size=6))
@example(b"l\r\nk\r\n0\r\n", [2, 5])
@example(b"l\n" + b"k" * 256 + b"\r\n0\n", [259, 260])
@example(b"l\n" + b"k" * 256 + b"\r\r\n0\n", [259, 260])
def test_any_bytes_have_a_defined_answer_wherever_they_are_cut(
    stream: bytes, cuts: list[int]
) -> None:
    check_stream(stream, cuts)


@given(st.lists(st.sampled_from([b"l", b"k", b"0", b"\r", b"\n"]), max_size=24).map(b"".join))
def test_cut_at_every_place(stream: bytes) -> None:
    whole = read(stream)
    for cut in range(len(stream) + 1):
        assert read(stream[:cut], stream[cut:]) == whole
    assert read(*[stream[i : i + 1] for i in range(len(stream))]) == whole


@given(st.binary(max_size=300))
def test_key_problem_agrees_with_the_reader(key: bytes) -> None:
    requests, _ = read(b"w\n" + key + b"\n0\n")
    if key_problem(key) is None:
        assert requests == [Wait(LOCK, key, 0)]
    else:
        assert Wait(LOCK, key, 0) not in requests


NAMED = {Acquire: b"acquire", Enqueue: b"enqueue", Wait: b"wait", Renew: b"renew", Hello: b"hello"}


def shuffled(request: Request, order: list[int]) -> tuple[bytes, list[bytes]]:
    """Return the command, and the fields in some order, but for the last if it goes on to the end."""
    command, key, argument, _ = encode_request(request).split(b"\n")
    last = argument.find(b" secret=" if command == b"hello" else b" label=")
    said = (argument if last < 0 else argument[:last]).split(b" ")
    said.sort(key=lambda field: order[sum(field) % len(order)])
    return command + b"\n" + key + b"\n", said + ([] if last < 0 else [argument[last + 1 :]])


@given(
    requests_.filter(lambda request: type(request) in NAMED),
    st.lists(st.integers(), min_size=1, max_size=9),
    st.integers(0, 100),
)
def test_the_order_of_fields_means_nothing_and_no_field_comes_twice(
    request: Request, order: list[int], which: int
) -> None:
    if not encode_request(request).startswith(NAMED[type(request)]):
        return
    head, said = shuffled(request, order)
    if said[0].startswith(b"label="):
        return
    assert read(head + b" ".join(said) + b"\n") == ([request], False)
    again = said[which % len(said)]
    if again.startswith((b"label=", b"secret=")):
        again = said[0]
    for wrong in ([again, *said], [b"", *said], [b"colour=", *said], [b"x", *said]):
        found, gave_up = read(head + b" ".join(wrong) + b"\n")
        assert gave_up or [type(each) for each in found] == [Malformed]


@given(named, st.binary(max_size=20))
def test_cut_anywhere_and_joined_with_another_fields_are_the_same(
    frame: bytes, beside: bytes
) -> None:
    alone = read(frame)
    assert len(alone[0]) == (not alone[1])
    for stream in (frame, frame + frame, b"ping\n_\n_\n" + frame + beside):
        check_stream(stream, [])
        expected = read(stream)
        for cut in range(len(stream) + 1):
            assert read(stream[:cut], stream[cut:]) == expected


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_fuzz_for_ten_minutes() -> None:
    end = time.monotonic() + 600

    @settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
    @given(streams, st.lists(st.integers(0, 70_000), max_size=12))
    def fuzz(stream: bytes, cuts: list[int]) -> None:
        check_stream(stream, cuts)

    while time.monotonic() < end:
        fuzz()


# Tokens.


@pytest.mark.parametrize("fence", [0, 1, 2**63, 2**64 - 1])
def test_token_carries_its_fence(fence: int) -> None:
    token = format_token(fence, bytes(range(8)))
    assert len(token) == 32
    assert fence_from_token(token) == fence
    assert fence_from_token(token.decode()) == fence


@pytest.mark.parametrize("token", ["", "ab", "g" * 32, "A" * 32, "٣" * 32, b"\xff" * 32])
def test_other_tokens_have_no_fence(token: str | bytes) -> None:
    with pytest.raises(ValueError, match="not a token"):
        fence_from_token(token)
