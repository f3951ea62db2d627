"""Requests on the wire: literal bytes, and their limits."""

from __future__ import annotations

import pytest

from dflockd.wire import (
    MAX_LIMIT,
    MAX_LINE,
    MAX_SECONDS,
    MAX_SECRET,
    Acquire,
    Auth,
    Barrier,
    Identify,
    Malformed,
    Ping,
    Request,
    RequestReader,
    Reserve,
    Shards,
    StableRef,
    Stats,
    encode_request,
    key_problem,
)
from tests.dflockd.wire.frames import FRAMES, LOCK, SEMAPHORE, TOKEN, read

# Read as well, because some client sends it, but never sent from here.
READ_ONLY: list[tuple[bytes, Request]] = [
    (b"l\r\nk\r\n10\r\n", Acquire(LOCK, b"k", 1, 10, None)),
    (b"l\nk\n 10  30 \n", Acquire(LOCK, b"k", 1, 10, 30)),
    (b"ping\n\n\n", Ping()),
    (b"stats\nanything\nat all\n", Stats()),
    (b"shards\n\n\n", Shards()),
    (b"shards\nanything\nat all\n", Shards(b"at")),
    (b"shards\n_\n zlib \n", Shards(b"zlib")),
    (b"shards\n_\n0af3  zlib \n", Shards(b"0af3", packed=True)),
    (b"shards\n_\n0af3 zlib 9\n", Shards(b"0af3")),
    (b"shards\n\0\n\0\xff zlib\n", Shards(b"\0\xff", packed=True)),
    (b"barrier\n\n\n", Barrier()),
    (b"auth\n\nx\n", Auth(b"x")),
    (b"auth\n_\n\n", Auth(b"")),
    (b"stable-ref\nr\n\n", StableRef(b"r")),
    ("l\nschlüssel\n0\n".encode(), Acquire(LOCK, "schlüssel".encode(), 1, 0, None)),
    (b"keep\nanything\n 1  2 \n", Reserve(1, 2)),
    (b"l\nk\x01\n0\n", Acquire(LOCK, b"k\x01", 1, 0, None)),
]

REFUSED = [
    b"l\nk\n1/2\n",
    b"l\nk\n0 0/2\n",
    b"l\nk\n0 1/0\n",
    b"l\nk\n0 1/\n",
    b"l\nk\n0 1/2/3\n",
    b"l\nk\n0 1/2 30\n",
    b"l\nk\n0 1048577/2\n",
    b"sl\nk\n0 1/2\n",
    b"w\nk\n0 1/2\n",
    b"unbegun\nk\na b\n",
    b"label\n_\n\xff\n",
    b"owner\n_\n\n",
    b"owner\na\tb\nrun 1\n",
    b"owner\n\xff\nrun 1\n",
    b"owner\n_\nrun\n",
    b"owner\n_\nrun 2147483648\n",
    b"owner\n_\nrun -1\n",
    b"owner\n_\nrun 1 one two\n",
    b"owner\n_\nr\xc3\xbcn 1\n",
    b"owner\n_\nrun 1 \x7f\n",
    b"owner\n_\n%b 1\n" % (b"r" * 65),
    b"owner\n_\nrun 1 %b\n" % (b"i" * 65),
    b"label\n_\na\x00b\n",
    b"i\n\n_\n",
    b"evict\nk\n18446744073709551616\n",
    b"evict\nk\n-1\n",
    b"evict\nk\n\n",
    b"\n\n\n",
    b"x\nk\n0\n",
    b"L\nk\n0\n",
    b" l\nk\n0\n",
    b"\xff\nk\n0\n",
    # Keys.
    b"l\n\n0\n",
    b"l\na b\n0\n",
    b"l\na\tb\n0\n",
    b"l\na\rb\n0\n",
    b"l\na\0b\n0\n",
    *(f"l\na{space}b\n0\n".encode() for space in "\v\f\x1c\x1f\x85\xa0\u2028\u3000"),
    b"l\n\xff\xfe\n0\n",
    b"r\n\n" + TOKEN + b"\n",
    # Fields, too few and too many.
    b"l\nk\n\n",
    b"l\nk\n1 2 3\n",
    b"sl\nk\n1\n",
    b"sl\nk\n1 2 3 4\n",
    b"r\nk\n\n",
    b"r\nk\na b\n",
    b"n\nk\n\n",
    b"n\nk\na 1 2\n",
    b"e\nk\n30 junk\n",
    b"se\nk\n\n",
    b"se\nk\n1 2 3\n",
    b"w\nk\n\n",
    b"w\nk\n1 2\n",
    b"keep\n_\n\n",
    b"keep\n_\n1\n",
    b"keep\n_\n1 2 3\n",
    b"skeep\n_\n1 2\n",
    b"group\n\n_\n",
    b"group\na b\n_\n",
    b"group\n\xff\n_\n",
    b"group\ng\n\n",
    b"group\ng\n1 2\n",
    b"sgroup\ng\n_\n",
    b"turn\n_\n\n",
    b"turn\n_\n1 2\n",
    b"sturn\n_\n1\n",
    b"pass\nk\n\n",
    b"pass\n\n0af3\n",
    b"pass\nk\na b\n",
    b"spass\nk\n" + b"a" * 65 + b"\n",
    b"owner\n_\nrun 0 i 0\n",
    b"owner\n_\nrun 0 i -1\n",
    b"owner\n_\nrun 0 i %d\n" % 2**64,
    b"owner\n_\nrun 0 i 1 1\n",
    b"age\n\n_\n",
    b"age\na b\n_\n",
    b"listen\nk\n\n",
    b"listen\nk\na b\n",
    b"listen\n\n" + TOKEN + b"\n",
    b"resume\n_\n\n",
    b"resume\n_\na b\n",
    b"resume\n_\n" + b"a" * 65 + b"\n",
    b"stable-ref\n\n_\n",
    b"stable-ref\na b\n_\n",
    b"stable-ref\n\xc3\xa4\n_\n",
    b"stable-ref\n" + b"r" * 65 + b"\n_\n",
]

BAD_NUMBERS = [
    b"-1",
    b"+5",
    b"1_0",
    b"1.5",
    b"0x10",
    b"ten",
    "٣".encode(),
    "²".encode(),
    b"00000000033",
    b"%d" % (MAX_SECONDS + 1),
    b"9" * 120,
]


def read_one(frame: bytes) -> Request:
    requests, gave_up = read(frame)
    assert not gave_up
    assert len(requests) == 1
    return requests[0]


@pytest.mark.parametrize(("frame", "request_"), FRAMES + READ_ONLY)
def test_is_read(frame: bytes, request_: Request) -> None:
    found = read_one(frame)
    assert found == request_
    assert type(found) is type(request_)


@pytest.mark.parametrize(("frame", "request_"), FRAMES)
def test_is_sent(frame: bytes, request_: Request) -> None:
    assert encode_request(request_) == frame


@pytest.mark.parametrize("frame", REFUSED)
def test_is_refused(frame: bytes) -> None:
    assert isinstance(read_one(frame), Malformed)


def test_malformed_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="malformed"):
        encode_request(Malformed("x"))


@pytest.mark.parametrize("number", BAD_NUMBERS)
@pytest.mark.parametrize(
    "frame",
    [
        b"l\nk\n%b\n",
        b"l\nk\n1 %b\n",
        b"sl\nk\n%b 1\n",
        b"sl\nk\n1 %b\n",
        b"sl\nk\n1 1 %b\n",
        b"n\nk\nt %b\n",
        b"e\nk\n%b\n",
        b"se\nk\n%b\n",
        b"se\nk\n1 %b\n",
        b"w\nk\n%b\n",
        b"keep\n_\n%b 1\n",
        b"keep\n_\n1 %b\n",
        b"turn\n_\n%b\n",
        b"group\ng\n%b\n",
    ],
)
def test_numbers_are_ascii_digits_within_bounds(frame: bytes, number: bytes) -> None:
    assert isinstance(read_one(frame % number), Malformed)


@pytest.mark.parametrize(
    "frame",
    [
        b"l\nk\n1 0\n",
        b"sl\nk\n1 0\n",
        b"sl\nk\n1 1 0\n",
        b"n\nk\nt 0\n",
        b"e\nk\n0\n",
        b"se\nk\n0\n",
        b"group\ng\n0\n",
    ],
)
def test_leases_and_limits_start_at_one(frame: bytes) -> None:
    assert isinstance(read_one(frame), Malformed)


def test_largest_numbers() -> None:
    top = b"%d" % MAX_SECONDS
    assert read_one(b"l\nk\n%b %b\n" % (top, top)) == Acquire(
        LOCK, b"k", 1, MAX_SECONDS, MAX_SECONDS
    )
    assert read_one(b"sl\nk\n0 %d\n" % MAX_LIMIT) == Acquire(SEMAPHORE, b"k", MAX_LIMIT, 0, None)
    assert isinstance(read_one(b"sl\nk\n0 %d\n" % (MAX_LIMIT + 1)), Malformed)


# Lengths, exact at the edge: they count the payload, neither LF nor the CR before it.


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("line", [0, 1, 2])
def test_line_limit_is_exact(line: int, end: bytes) -> None:
    for length, too_long in ((MAX_LINE, False), (MAX_LINE + 1, True)):
        lines = [b"r", b"k", b"t"]
        lines[line] = b"x" * length
        frame = b"".join(text + end for text in lines)
        for pieces in ([frame], [frame[i : i + 1] for i in range(len(frame))]):
            requests, gave_up = read(*pieces)
            assert gave_up is too_long
            assert len(requests) == (not too_long)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_auth_argument_may_be_longer(end: bytes) -> None:
    secret = b"s" * MAX_SECRET
    frame = b"auth" + end + b"_" + end + secret + end
    assert read(frame) == ([Auth(secret)], False)
    assert read(frame[:70], frame[70:40_000], frame[40_000:-1], frame[-1:]) == (
        [Auth(secret)],
        False,
    )
    longer = b"auth" + end + b"_" + end + secret + b"s" + end
    assert read(longer) == ([], True)
    assert read(b"auth" + end + b"k" * (MAX_LINE + 1) + end + b"x" + end) == ([], True)


def test_endless_line_is_refused_while_it_comes_in() -> None:
    assert read(b"l\n" + b"k" * (MAX_LINE + 2)) == ([], True)
    assert read(b"auth\n_\n" + b"s" * (MAX_SECRET + 2)) == ([], True)
    # Only the argument of auth may be long, whoever the frames before it were.
    assert read(b"ping\n_\n_\nl\nauth\n" + b"x" * (MAX_LINE + 2)) == ([Ping()], True)


def test_requests_before_a_line_that_is_too_long_are_read() -> None:
    requests, gave_up = read(b"ping\n_\n_\nl\nk\n" + b"1" * 300 + b"\n")
    assert requests == [Ping()]
    assert gave_up


def test_reader_says_where_it_stands() -> None:
    reader = RequestReader()
    assert not reader.in_frame
    assert not reader.ready
    reader.receive(b"l")
    assert reader.in_frame
    reader.receive(b"\nk\n0\npi")
    assert reader.ready
    assert reader.pending == len(b"l\nk\n0\npi")
    assert reader.next_request() == Acquire(LOCK, b"k", 1, 0, None)
    assert reader.in_frame
    assert not reader.ready
    assert reader.pending == 2
    reader.receive(b"ng\n\n\n")
    assert reader.next_request() == Ping()
    assert not reader.in_frame
    assert reader.pending == 0


def test_secret_is_not_in_repr() -> None:
    assert "sesame" not in repr(Auth(b"sesame"))


def test_a_nonce_is_letters_and_digits() -> None:
    for nonce in (b"", b"a b", b"x" * 65):
        assert isinstance(read_one(b"identify\n_\n%b\n" % nonce), Malformed)
    assert read_one(b"identify\n_\n%b\n" % (b"x" * 64)) == Identify(b"x" * 64)


def test_the_longest_key() -> None:
    assert key_problem(b"k" * MAX_LINE) is None
    assert key_problem(b"k" * (MAX_LINE + 1)) == "has 257 bytes, 256 are allowed"
