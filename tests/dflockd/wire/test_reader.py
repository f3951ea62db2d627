"""What the reader says of a request without a message is what the message says."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.wire import (
    Acquire,
    Auth,
    Enqueue,
    FrameTooLongError,
    Hello,
    Malformed,
    Ping,
    Release,
    Renew,
    Request,
    RequestReader,
    Space,
    Wait,
    key_problem,
)
from dflockd.wire import requests as module
from dflockd.wire.requests import ACQUIRE, ENQUEUE, ENTRY, OTHER, RELEASE, RENEW, WAIT
from tests.dflockd.wire.frames import FRAMES
from tests.dflockd.wire.test_any_requests import streams
from tests.dflockd.wire.test_requests import BAD_NUMBERS, READ_ONLY, REFUSED


def said(reader: RequestReader, kind: int) -> object:
    """What the reader says of the request for a slot that it has just cut out."""
    space, key, asked = Space(reader.space), reader.key, reader.asked
    if kind == RELEASE:
        return Release(space, key, reader.token)
    if kind == RENEW:
        return Renew(space, key, reader.token, reader.lease)
    if kind == WAIT:
        return Wait(space, key, asked.timeout, asked.reserve, asked.age)
    slot = asked.lease, asked.rate, asked.owner, asked.label, asked.group, asked.ticket
    if kind == ENQUEUE:
        return Enqueue(space, key, asked.limit, *slot, asked.turn)
    assert kind == ACQUIRE
    return Acquire(space, key, asked.limit, asked.timeout, *slot, asked.reserve)


KINDS = {
    Acquire: ACQUIRE,
    Enqueue: ENQUEUE,
    Wait: WAIT,
    Release: RELEASE,
    Renew: RENEW,
    Auth: ENTRY,
    Hello: ENTRY,
}


def check(reader: RequestReader, kind: int) -> tuple[type, Request]:
    """Compare what was just cut out with its message."""
    message = reader.request()
    if kind >= RELEASE:
        if isinstance(message, Malformed):
            # All but the key has been looked at.
            assert key_problem(reader.key), message
        else:
            assert said(reader, kind) == message
    elif not isinstance(message, Malformed):
        # A renewal with named fields is only had as a message.
        assert kind == KINDS.get(type(message), OTHER) or (type(message), kind) == (Renew, OTHER)
    return type(message), message


Read = tuple[list[tuple[type, Request]], bool]
"""Requests with their types, for those without fields are all equal; and whether it gave up."""


def read(pieces: list[bytes]) -> Read:
    """Read as a server does: at once what can be, and else one by one."""
    reader = RequestReader()
    requests: list[tuple[type, Request]] = []
    for piece in pieces:
        kind = reader.receive_one(piece)
        if kind != OTHER:
            requests.append(check(reader, kind))
            assert not reader.ready
            continue
        try:
            while reader.ready:
                requests.append(check(reader, reader.next()))
            if reader.in_frame:
                reader.check_unfinished()
        except FrameTooLongError:
            return requests, True
    return requests, False


def messages(pieces: list[bytes]) -> Read:
    reader = RequestReader()
    requests: list[tuple[type, Request]] = []
    for piece in pieces:
        reader.receive(piece)
        try:
            while (request := reader.next_request()) is not None:
                requests.append((type(request), request))
        except FrameTooLongError:
            return requests, True
    return requests, False


ONE = [frame for frame, _ in FRAMES + READ_ONLY] + REFUSED
ODD = [b"r\nk\nt \n", b"r\nk\n t\n", b"r\nk\n\xe4\n", b"n\nk\nt\t3 \n", b"l\nk\n 0\n", b"e\nk\n \n"]


@pytest.mark.parametrize("frame", ONE + ODD)
def test_each_request_is_the_same_both_ways(frame: bytes) -> None:
    for pieces in ([frame], [frame * 2], [frame[:1], frame[1:]], [frame.replace(b"\n", b"\r\n")]):
        assert read(pieces) == messages(pieces)


@pytest.mark.parametrize("frame", ONE + ODD)
def test_each_request_is_the_same_both_ways_behind_another(frame: bytes) -> None:
    for first in (b"acquire\nk\ntimeout=0 owner=run\n", b"acquire\nk\ntimeout=\n", b"l\nk\n0\n"):
        data = first + frame
        for pieces in ([data], [data + b"w", b"\nk\n0\n"], [data[:-1], data[-1:]], [b"w\n", data]):
            assert read(pieces) == messages(pieces)


@pytest.mark.parametrize("number", BAD_NUMBERS)
@pytest.mark.parametrize(
    "frame", [b"l\nk\n%b\n", b"sl\nk\n1 %b\n", b"n\nk\nt %b\n", b"wait\nk\ntimeout=%b\n"]
)
def test_a_bad_number_is_none_both_ways(frame: bytes, number: bytes) -> None:
    assert read([frame % number])[0][0][0] is Malformed


@given(streams, st.lists(st.integers(0, 1 << 20), max_size=4))
def test_any_bytes_cut_anywhere_are_the_same_both_ways(stream: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(edges)]
    assert read(pieces) == messages(pieces)


def test_the_rest_of_a_request_is_none_of_its_own() -> None:
    reader = RequestReader()
    assert reader.receive_one(b"auth\n_\n") == OTHER
    # These three lines would be one.
    assert reader.receive_one(b"l\nk\n0\n") == OTHER
    assert reader.next_request() == Auth(b"l")
    assert reader.in_frame


def test_what_is_ready_goes_first() -> None:
    reader = RequestReader()
    reader.receive(b"ping\n_\n_\n")
    assert reader.receive_one(b"l\nk\n0\n") == OTHER
    assert reader.next_request() == Ping()
    assert reader.next_request() == Acquire(Space.LOCK, b"k", 1, 0, None)


def test_what_one_request_says_is_not_left_for_the_next() -> None:
    reader = RequestReader()
    every = (
        b"timeout=1 away=2 hold=3 limit=4 lease=5 rate=6/7 owner=o age=8 group=g ticket=0a label=l"
    )
    assert reader.receive_one(b"acquire\nk\n%b\n" % every) == ACQUIRE
    asked = reader.asked
    for frame, message in (
        (b"acquire\nk\ntimeout=0\n", Acquire(Space.LOCK, b"k", 1, 0, None)),
        (b"l\nk\n0\n", Acquire(Space.LOCK, b"k", 1, 0, None)),
        (b"enqueue\nk\n\n", Enqueue(Space.LOCK, b"k", 1, None)),
        (b"wait\nk\ntimeout=0\n", Wait(Space.LOCK, b"k", 0)),
    ):
        kind = reader.receive_one(frame)
        assert said(reader, kind) == message == reader.request()
    assert (asked.timeout, asked.limit, asked.lease, asked.age) == (1, 4, 5, 0)


def test_few_arguments_are_kept() -> None:
    dice = random.Random(1)
    for _ in range(10 * module.MOST_KNOWN):
        timeout, lease = dice.randrange(10**9), dice.randrange(1, 10**9)
        reader = RequestReader()
        assert reader.receive_one(b"l\nk\n%d %d\n" % (timeout, lease)) == ACQUIRE
        assert (reader.asked.timeout, reader.asked.lease) == (timeout, lease)
        assert all(len(each.known) <= module.MOST_KNOWN for each in module.COMMANDS.values())
