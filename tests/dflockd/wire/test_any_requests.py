"""Any request is read as it was sent, and any bytes at all have a defined answer."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dflockd.wire import (
    MAX_LIMIT,
    MAX_LINE,
    MAX_SECONDS,
    Acquire,
    Auth,
    Barrier,
    Begun,
    Detach,
    Enqueue,
    Evict,
    Find,
    Identify,
    InGroup,
    Inspect,
    Label,
    Owner,
    Pass,
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
    Turn,
    Unbegun,
    Wait,
    encode_request,
    fence_from_token,
    format_token,
    key_problem,
)
from dflockd.wire.messages import MAX_ATTEMPT, MAX_RATE
from tests.dflockd.wire.frames import FRAMES, LOCK, SEMAPHORE, pieces, read, text

keys = st.text(min_size=1, max_size=60).map(str.encode).filter(lambda key: not key_problem(key))

keys = keys | st.integers(1, MAX_LINE).map(lambda length: b"k" * length)

seconds = st.integers(0, MAX_SECONDS)

leases = st.none() | st.integers(1, MAX_SECONDS)

limits = st.integers(1, MAX_LIMIT)

tokens = st.integers(0, 2**64 - 1).map(lambda fence: format_token(fence, b"\x01\xab" * 4))

spaces = st.sampled_from(Space)

tickets = st.from_regex(rb"[0-9A-Za-z]{1,64}", fullmatch=True)

owners = st.from_regex(rb"[!-~]{1,64}", fullmatch=True)

labels = st.text(max_size=60).filter(str.isprintable).map(str.encode)

spoken_labels = st.none() | labels.filter(b"_".__ne__)

rates = st.none() | st.builds(Rate, st.integers(1, MAX_RATE), st.integers(1, MAX_SECONDS))

requests_ = st.one_of(
    st.builds(Acquire, st.just(LOCK), keys, st.just(1), seconds, leases, rates),
    st.builds(Acquire, st.just(SEMAPHORE), keys, limits, seconds, leases, rates),
    st.builds(Enqueue, st.just(LOCK), keys, st.just(1), leases, rates),
    st.builds(Enqueue, st.just(SEMAPHORE), keys, limits, leases, rates),
    st.builds(Wait, spaces, keys, seconds),
    st.builds(Release, spaces, keys, tokens),
    st.builds(Renew, spaces, keys, tokens, leases),
    st.builds(Begun, spaces, keys, tokens, leases),
    st.builds(Unbegun, spaces, keys, tokens),
    st.builds(Detach, spaces, keys, tokens, leases),
    st.builds(Auth, text),
    st.builds(StableRef, st.from_regex(rb"[!-~]{1,64}", fullmatch=True)),
    st.sampled_from([Stats(), Ping(), Barrier()]),
    st.builds(Inspect, spaces, keys),
    st.builds(Find, labels, st.booleans(), st.booleans()),
    st.builds(Evict, spaces, keys, st.integers(0, 2**64 - 1)),
    st.builds(
        Shards, st.just(b"") | st.from_regex(rb"[0-9a-f]{1,64}", fullmatch=True), st.booleans()
    ),
    st.builds(Identify, tickets),
    st.builds(Reserve, seconds, seconds),
    st.builds(Resume, tickets),
    st.builds(InGroup, keys, st.integers(0, MAX_LIMIT)),
    st.builds(Turn, seconds),
    st.builds(Pass, spaces, keys, tickets),
    st.builds(Owner, st.just(b""), st.just(0), st.just(b""), spoken_labels, st.just(0)),
    st.builds(
        Owner,
        owners,
        st.integers(0, MAX_ATTEMPT),
        st.just(b"") | owners,
        spoken_labels,
        st.just(0),
    ),
    st.builds(
        Owner, owners, st.integers(0, MAX_ATTEMPT), owners, spoken_labels, st.integers(0, 2**64 - 1)
    ),
    st.builds(Label, labels),
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
