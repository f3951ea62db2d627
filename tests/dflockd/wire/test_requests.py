"""Requests on the wire: literal bytes, limits, and a defined answer to any bytes at all."""

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
    MAX_SECRET,
    Acquire,
    Auth,
    Barrier,
    Begun,
    Confirm,
    Detach,
    DrawAge,
    Enqueue,
    Evict,
    Find,
    FrameTooLongError,
    Identify,
    InGroup,
    Inspect,
    Label,
    Listen,
    Malformed,
    Owner,
    Pass,
    Ping,
    Rate,
    Release,
    Renew,
    Request,
    RequestReader,
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

LOCK, SEMAPHORE = Space.LOCK, Space.SEMAPHORE
TOKEN = b"0123456789abcdef0123456789abcdef"

# What is read from these bytes, and which bytes are sent for it.
FRAMES: list[tuple[bytes, Request]] = [
    (b"l\nk\n10\n", Acquire(LOCK, b"k", 1, 10, None)),
    (b"l\nk\n0 30\n", Acquire(LOCK, b"k", 1, 0, 30)),
    (b"sl\nk\n10 3\n", Acquire(SEMAPHORE, b"k", 3, 10, None)),
    (b"sl\nk\n10 3 30\n", Acquire(SEMAPHORE, b"k", 3, 10, 30)),
    (b"l\nk\n0 10/60000\n", Acquire(LOCK, b"k", 1, 0, None, Rate(10, 60_000))),
    (b"l\nk\n0 30 10/60000\n", Acquire(LOCK, b"k", 1, 0, 30, Rate(10, 60_000))),
    (b"sl\nk\n9 3 1048576/1\n", Acquire(SEMAPHORE, b"k", 3, 9, None, Rate(1 << 20, 1))),
    (b"sl\nk\n9 3 30 1/5\n", Acquire(SEMAPHORE, b"k", 3, 9, 30, Rate(1, 5))),
    (b"e\nk\n 10/60000\n", Enqueue(LOCK, b"k", 1, None, Rate(10, 60_000))),
    (b"e\nk\n30 10/60000\n", Enqueue(LOCK, b"k", 1, 30, Rate(10, 60_000))),
    (b"se\nk\n3 10/60000\n", Enqueue(SEMAPHORE, b"k", 3, None, Rate(10, 60_000))),
    (b"se\nk\n3 30 10/60000\n", Enqueue(SEMAPHORE, b"k", 3, 30, Rate(10, 60_000))),
    (b"begun\nk\nabc 60\n", Begun(LOCK, b"k", b"abc", 60)),
    (b"sbegun\nk\nabc\n", Begun(SEMAPHORE, b"k", b"abc", None)),
    (b"unbegun\nk\nabc\n", Unbegun(LOCK, b"k", b"abc")),
    (b"sunbegun\nk\nabc\n", Unbegun(SEMAPHORE, b"k", b"abc")),
    (b"r\nk\n" + TOKEN + b"\n", Release(LOCK, b"k", TOKEN)),
    (b"sr\nk\n" + TOKEN + b"\n", Release(SEMAPHORE, b"k", TOKEN)),
    (b"n\nk\n" + TOKEN + b"\n", Renew(LOCK, b"k", TOKEN, None)),
    (b"n\nk\n" + TOKEN + b" 60\n", Renew(LOCK, b"k", TOKEN, 60)),
    (b"sn\nk\n" + TOKEN + b"\n", Renew(SEMAPHORE, b"k", TOKEN, None)),
    (b"sn\nk\n" + TOKEN + b" 60\n", Renew(SEMAPHORE, b"k", TOKEN, 60)),
    (b"e\nk\n\n", Enqueue(LOCK, b"k", 1, None)),
    (b"e\nk\n30\n", Enqueue(LOCK, b"k", 1, 30)),
    (b"se\nk\n3\n", Enqueue(SEMAPHORE, b"k", 3, None)),
    (b"se\nk\n3 30\n", Enqueue(SEMAPHORE, b"k", 3, 30)),
    (b"w\nk\n10\n", Wait(LOCK, b"k", 10)),
    (b"sw\nk\n0\n", Wait(SEMAPHORE, b"k", 0)),
    (b"stats\n_\n_\n", Stats()),
    (b"auth\n_\nopen sesame\n", Auth(b"open sesame")),
    (b"ping\n_\n_\n", Ping()),
    (b"barrier\n_\n_\n", Barrier()),
    (b"stable-ref\npublisher-1\n_\n", StableRef(b"publisher-1")),
    ("label\n_\nsync é 7\n".encode(), Label("sync é 7".encode())),
    (b"label\n_\n\n", Label(b"")),
    (b"owner\n_\n_\n", Owner(b"", 0)),
    (b"owner\n_\nrun-7 0\n", Owner(b"run-7", 0)),
    (b"owner\n_\n_ 3 _\n", Owner(b"_", 3, b"_")),
    ("owner\nsync é 7\nrun-7 0\n".encode(), Owner(b"run-7", 0, b"", "sync é 7".encode())),
    (b"owner\n\nrun-7 0 i\n", Owner(b"run-7", 0, b"i", b"")),
    (b"owner\nme\n_\n", Owner(b"", 0, b"", b"me")),
    (b"owner\nme\nrun-7 0 i 1\n", Owner(b"run-7", 0, b"i", b"me", 1)),
    (b"owner\n_\nrun-7 2 i %d\n" % (2**64 - 1), Owner(b"run-7", 2, b"i", None, 2**64 - 1)),
    (
        b"owner\n_\n%b 2147483647 %b\n" % (b"r" * 64, b"i" * 64),
        Owner(b"r" * 64, 2147483647, b"i" * 64),
    ),
    (b"i\nk\n_\n", Inspect(LOCK, b"k")),
    (b"si\nk\n_\n", Inspect(SEMAPHORE, b"k")),
    (b"find\n_\nsync [3f\n", Find(b"sync [3f")),
    (b"find\nwaiters,all\n\n", Find(b"", waiters=True, notes=True)),
    (b"find\nall\nx\n", Find(b"x", notes=True)),
    (b"confirm\nk\nabc 60\n", Confirm(LOCK, b"k", b"abc", 60)),
    (b"sconfirm\nk\nabc\n", Confirm(SEMAPHORE, b"k", b"abc", None)),
    (b"detach\nk\nabc 60\n", Detach(LOCK, b"k", b"abc", 60)),
    (b"sdetach\nk\nabc\n", Detach(SEMAPHORE, b"k", b"abc", None)),
    (b"evict\nk\n18446744073709551615\n", Evict(LOCK, b"k", 2**64 - 1)),
    (b"sevict\nk\n1\n", Evict(SEMAPHORE, b"k", 1)),
    (b"shards\n_\n_\n", Shards()),
    (b"shards\n_\n_ zlib\n", Shards(packed=True)),
    (b"shards\n_\n0af3\n", Shards(b"0af3")),
    (b"shards\n_\n0af3 zlib\n", Shards(b"0af3", packed=True)),
    (b"identify\n_\n0aZ9\n", Identify(b"0aZ9")),
    (b"resume\n_\n0123456789abcdef\n", Resume(b"0123456789abcdef")),
    (b"group\ntenant:7\n_\n", InGroup(b"tenant:7")),
    ("group\ntenant:é\n3\n".encode(), InGroup("tenant:é".encode(), 3)),
    (b"group\n%b\n%d\n" % (b"g" * MAX_LINE, MAX_LIMIT), InGroup(b"g" * MAX_LINE, MAX_LIMIT)),
    (b"keep\n_\n1500 0\n", Reserve(1500, 0)),
    (b"keep\n_\n0 %d\n" % MAX_SECONDS, Reserve(0, MAX_SECONDS)),
    (b"turn\n_\n1500\n", Turn(1500)),
    (b"turn\n_\n0\n", Turn(0)),
    (b"age\nk\n_\n", DrawAge(b"k")),
    (b"listen\nk\n" + TOKEN + b"\n", Listen(b"k", TOKEN)),
    (b"pass\nk\n0aZ9\n", Pass(LOCK, b"k", b"0aZ9")),
    (b"spass\nk\n0aZ9\n", Pass(SEMAPHORE, b"k", b"0aZ9")),
]

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
    b"%d" % (MAX_SECONDS + 1),
    b"9" * 120,
]


def read(*pieces: bytes) -> tuple[list[Request], bool]:
    """Return what a reader makes of the pieces, and whether it gave up in the end."""
    reader = RequestReader()
    requests: list[Request] = []
    for piece in pieces:
        reader.receive(piece)
        try:
            while (request := reader.next_request()) is not None:
                requests.append(request)
        except FrameTooLongError:
            return requests, True
    return requests, False


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


# Any request, any bytes, any cut.

keys = st.text(min_size=1, max_size=60).map(str.encode).filter(lambda key: not key_problem(key))
keys = keys | st.integers(1, MAX_LINE).map(lambda length: b"k" * length)
seconds = st.integers(0, MAX_SECONDS)
leases = st.none() | st.integers(1, MAX_SECONDS)
limits = st.integers(1, MAX_LIMIT)
tokens = st.integers(0, 2**64 - 1).map(lambda fence: format_token(fence, b"\x01\xab" * 4))
spaces = st.sampled_from(Space)
text = st.binary(max_size=300).filter(lambda line: b"\n" not in line and not line.endswith(b"\r"))

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

# Bytes that get far into the parser: words of the format, and junk.
pieces = st.one_of(
    st.sampled_from([b"l", b"sl", b"r", b"n", b"e", b"se", b"w", b"sw", b"auth", b"i", b"label"]),
    st.sampled_from([b"owner\n_\n", b"run 1", b"owner"]),
    st.sampled_from([b"keep\n_\n", b"resume\n_\n", b"identify\n_\n", b"1 2\n"]),
    st.sampled_from(
        [b"turn\n_\n", b"pass", b"spass\nk\n", b"group\ng\n", b"begun\nk\n", b" 1/2", b"1/"]
    ),
    st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b"\r", b" ", b"\t", b"\0", b"0", b"1", b"33"]),
    st.sampled_from([b"k" * 255, b"k" * 256, b"k" * 257, b"s" * MAX_SECRET]),
    st.binary(max_size=8),
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
