"""What is wrong is said: the words that people find in a log or an error."""

from __future__ import annotations

import json

import pytest

from dflockd.wire import (
    MAX_LINE,
    MAX_SECRET,
    FrameTooLongError,
    Malformed,
    ReplyReader,
    Report,
    RequestReader,
    decode_map,
    parse_done,
)
from dflockd.wire.maps import BadMapError
from dflockd.wire.messages import MAX_FIELDS, MAX_HELLO
from dflockd.wire.replies import UnexpectedReplyError
from tests.dflockd.wire.frames import read


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"lock\nk\n0\n", "unknown command"),
        (b"l\nk\nsoon\n", "number missing, malformed or out of range"),
        (b"acquire\nk\ntimeout=0 label=\x07\n", "a label is up to 256 bytes of printable UTF-8"),
        (b"acquire\nk\ntimeout=0 colour=red\n", "a field is empty, unknown or there twice"),
        (b"wait\nk\ntimeout=0 label=x\n", "an empty label, or one that does not belong here"),
        (b"acquire\nk\ntimeout=0 age=7\n", "the attempt of nobody, or the age"),
        (b"acquire\nk\ntimeout=0 group-limit=7\n", "the limit of no group"),
        (b"acquire\nk\ntimeout=0 weight=7\n", "a weight without a limit"),
        (b"enqueue\nk\ngroup=\xff\n", "group is not UTF-8"),
        (b"enqueue\nk\nowner=\xff\n", "a name is 1 to 64 printable ASCII characters"),
        (b"enqueue\nk\nticket=-\n", "a ticket is 1 to 64 letters and digits"),
        (b"renew\nk\nlease=9\n", "no token"),
        (b"renew\nk\ntoken=t how=so\n", "an unknown way to renew"),
        (b"l\nk k\n0\n", "key contains white space or NUL"),
        (b"l\n\xff\n0\n", "key is not UTF-8"),
    ],
)
def test_a_request_that_is_none_says_why(frame: bytes, reason: str) -> None:
    assert read(frame) == ([Malformed(reason)], False)


@pytest.mark.parametrize(
    ("command", "number", "limit"),
    [
        *((b"l", number, MAX_LINE) for number in (1, 2, 3)),
        *((b"acquire", number, MAX_LINE) for number in (1, 2)),
        (b"acquire", 3, MAX_FIELDS),
        (b"hello", 3, MAX_HELLO),
    ],
)
def test_a_line_that_is_too_long_is_named(command: bytes, number: int, limit: int) -> None:
    lines = [command, b"k", b"0"]
    lines[number - 1] = b"x" * (limit + 1)
    for ends in (b"\n", b""):
        reader = RequestReader()
        reader.receive(b"\n".join(lines[:number]) + ends)
        with pytest.raises(FrameTooLongError) as raised:
            reader.check_unfinished()
        assert str(raised.value) == f"line {number} of a request is over {limit} bytes"


def test_the_limit_of_a_secret_is_named() -> None:
    reader = RequestReader()
    reader.receive(b"auth\n_\n" + b"s" * (MAX_SECRET + 1))
    with pytest.raises(
        FrameTooLongError, match=f"^line 3 of a request is over {MAX_SECRET} bytes$"
    ):
        reader.check_unfinished()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[]", "no JSON object"),
        (b"{", "Expecting property name"),
        (json.dumps({"zlib": "AAAA"}).encode(), "Error -3 while decompressing"),
        (json.dumps({"zlib": ""}).encode(), "it is cut off, or over"),
    ],
)
def test_a_map_that_is_none_says_why(text: bytes, reason: str) -> None:
    with pytest.raises(BadMapError, match=reason):
        decode_map(Report(text))


def test_a_reply_that_nobody_asked_for_says_why() -> None:
    reader = ReplyReader()
    with pytest.raises(UnexpectedReplyError, match=r"^a line that nobody asked for$"):
        reader.receive(b"ok\n")
    reader.owed = 1
    with pytest.raises(UnexpectedReplyError, match=r"^more in reply than one line$"):
        reader.receive(b"ok\nok\n")
    with pytest.raises(UnexpectedReplyError, match=r"^unexpected reply b'okay'$"):
        parse_done(b"okay")
    with pytest.raises(UnexpectedReplyError, match=r"^unexpected number of milliseconds b'soon'$"):
        parse_done(b"error_recovering soon")
