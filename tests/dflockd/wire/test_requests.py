"""Requests on the wire: literal bytes, and their limits."""

from __future__ import annotations

import pytest

from dflockd.wire import (
    ALL,
    MAX_AGE,
    MAX_ATTEMPT,
    MAX_LIMIT,
    MAX_LINE,
    MAX_OWNER,
    MAX_RATE,
    MAX_SECONDS,
    MAX_SECRET,
    Acquire,
    Auth,
    Barrier,
    Enqueue,
    FairGroup,
    Hello,
    Identify,
    Malformed,
    Owner,
    Ping,
    Rate,
    Renew,
    Request,
    RequestReader,
    Reserve,
    Shards,
    StableRef,
    Stats,
    Wait,
    encode_request,
    key_problem,
)
from dflockd.wire.messages import MAX_FIELDS, MAX_HELLO, MAX_TICKET
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
    (b"l\nk\x01\n0\n", Acquire(LOCK, b"k\x01", 1, 0, None)),
    # Named fields: in any order, of requests that are sent in another frame, of later clients.
    (b"acquire\nk\ntimeout=9\n", Acquire(LOCK, b"k", 1, 9, None)),
    (b"acquire\nk\nlimit=1 timeout=9\n", Acquire(LOCK, b"k", 1, 9, None)),
    (
        b"acquire\nk\nhold=2 timeout=9 away=1\n",
        Acquire(LOCK, b"k", 1, 9, None, reserve=Reserve(1, 2)),
    ),
    (
        b"acquire\nk\nowner=run-7 timeout=9\n",
        Acquire(LOCK, b"k", 1, 9, None, owner=Owner(b"run-7", 0)),
    ),
    (
        b"acquire\nk\nage=7 timeout=9 owner=run-7\n",
        Acquire(LOCK, b"k", 1, 9, None, owner=Owner(b"run-7", 0, 7)),
    ),
    (b"enqueue\nk\n\n", Enqueue(LOCK, b"k", 1, None)),
    (b"enqueue\r\nk\r\nlease=3\r\n", Enqueue(LOCK, b"k", 1, 3)),
    (b"wait\nk\ntimeout=9\n", Wait(LOCK, b"k", 9)),
    (b"renew\nk\nlease=9 token=abc\n", Renew(LOCK, b"k", b"abc", 9)),
    (b"hello\nhere\ncolour=red version=1\n", Hello(b"here", b"1")),
    (b"hello\nhere\nversion=1 label=x secret=s\n", Hello(b"here", b"1", b"s")),
]

LONG = b"x" * (MAX_LINE + 1)

# Of named fields: what is wrong, and how it is said. One line each in docs/protocol.md.
WRONG_FIELDS = [
    # Unknown, or not of this request.
    *(b"acquire timeout=1 colour=red", b"acquire timeout=1 turn=1", b"acquire timeout=1 token=abc"),
    *(
        b"acquire timeout=1 how=begun",
        b"acquire timeout=1 Limit=1",
        b"acquire timeout=1 group_limit=1",
    ),
    *(b"enqueue timeout=1", b"enqueue away=1 hold=1", b"enqueue colour=red", b"enqueue token=abc"),
    *(b"wait timeout=1 limit=1", b"wait timeout=1 label=me", b"wait timeout=1 owner=me"),
    *(b"wait timeout=1 ticket=0a", b"renew token=abc limit=1", b"renew token=abc timeout=1"),
    *(b"renew token=abc rate=1/1", b"renew token=abc ticket=0a", b"renew token=abc away=1 hold=1"),
    # Missing.
    *(
        b"acquire ",
        b"acquire limit=1",
        b"acquire label=me",
        b"wait ",
        b"wait age=1",
        b"renew lease=1",
    ),
    *(b"acquire timeout=1 away=1", b"acquire timeout=1 hold=1", b"wait timeout=1 hold=1"),
    *(b"acquire timeout=1 attempt=0", b"acquire timeout=1 age=1", b"renew token=abc attempt=1"),
    *(b"acquire timeout=1 group-limit=1", b"renew token=abc group-limit=1", b"renew label=me"),
    *(b"acquire timeout=1 weight=2", b"acquire timeout=1 limit=1 weight=1", b"enqueue weight=2"),
    *(b"hello ", b"hello secret=s", b"hello colour=red"),
    # Twice.
    *(
        b"acquire timeout=1 timeout=1",
        b"acquire timeout=1 limit=1 limit=2",
        b"wait timeout=1 timeout=2",
    ),
    *(b"enqueue turn=1 turn=1", b"renew token=abc token=abc", b"hello version=1 version=1"),
    b"hello version=1 colour=red colour=red",
    # Empty, or no field at all.
    *(
        b"acquire timeout=",
        b"acquire timeout=1 limit=",
        b"acquire timeout=1 owner=",
        b"enqueue group=",
    ),
    *(b"acquire timeout=1 label=", b"enqueue label=", b"renew token=", b"renew token=abc how="),
    *(
        b"acquire timeout=1 lease",
        b"acquire timeout=1 =1",
        b"enqueue =1",
        b"wait timeout=1 =1",
        b"acquire 1",
        b"hello version=",
    ),
    *(b"hello version=1 colour= secret=s", b"hello version=1 colour secret=s"),
    # Spaces: one, between two fields.
    *(
        b"acquire timeout=1  limit=1",
        b"acquire  timeout=1",
        b"acquire timeout=1 ",
        b"enqueue  label=x",
    ),
    *(
        b"acquire timeout=1\tlimit=1",
        b"acquire timeout=1  label=x",
        b"enqueue  ",
        b"wait timeout=1 ",
    ),
    *(
        b"acquire timeout= 1",
        b"acquire timeout =1",
        b"hello version=1  secret=s",
        b"hello  version=1",
    ),
    # Rates: runs, one stroke, milliseconds.
    *(b"acquire timeout=1 rate=1", b"acquire timeout=1 rate=1/", b"acquire timeout=1 rate=/1"),
    *(
        b"acquire timeout=1 rate=1/2/3",
        b"acquire timeout=1 rate=0/2",
        b"acquire timeout=1 rate=1/0",
    ),
    *(b"acquire timeout=1 rate=%d/2" % (MAX_RATE + 1), b"enqueue rate=1/%d" % (MAX_SECONDS + 1)),
    # Owners.
    *(
        b"enqueue owner=r\xc3\xbcn",
        b"enqueue owner=a\x7f",
        b"enqueue owner=" + b"o" * (MAX_OWNER + 1),
    ),
    *(b"enqueue owner=me attempt=%d" % (MAX_ATTEMPT + 1), b"enqueue owner=me attempt=-1"),
    *(
        b"enqueue owner=me age=0",
        b"enqueue owner=me age=%d" % (MAX_AGE + 1),
        b"wait timeout=1 age=0",
    ),
    # Groups are as keys, tickets letters and digits.
    *(
        b"enqueue group=\xff",
        b"enqueue group=a\0",
        b"enqueue group=" + LONG,
        b"enqueue group=g group-limit=0",
        b"enqueue limit=2 weight=0",
        b"enqueue limit=2 weight=%d" % (MAX_LIMIT + 1),
        b"wait timeout=1 weight=2",
    ),
    *(b"enqueue group=g group-limit=%d" % (MAX_LIMIT + 1), "enqueue group=a\u3000b".encode()),
    *(
        b"enqueue ticket=a-b",
        b"enqueue ticket=" + b"t" * (MAX_TICKET + 1),
        "enqueue ticket=é".encode(),
    ),
    # Labels.
    *(b"acquire timeout=1 label=\xff", b"acquire timeout=1 label=a\0b", b"enqueue label=a\tb"),
    *(b"renew token=abc label=\x07", b"enqueue label=" + LONG),
    # The rest.
    *(b"renew token=abc how=plain", b"renew token=abc how=BEGUN", b"acquire timeout=1 limit=0"),
    *(b"acquire timeout=1 limit=%d" % (MAX_LIMIT + 1), b"acquire timeout=1 lease=0"),
    b"hello version=" + b"v" * (MAX_OWNER + 1),
]

REFUSED = [
    *(b"%b\nk\n%b\n" % tuple(each.split(b" ", 1)) for each in WRONG_FIELDS),
    *(b"hello\n%b\nversion=1\n" % who for who in (b"", b"a b", b"\xff", b"i" * (MAX_OWNER + 1))),
    *(b"acquire\n%b\ntimeout=0\n" % key for key in (b"", b"a b", b"a\0", b"\xff")),
    *(b"renew\n%b\ntoken=abc\n" % key for key in (b"", b"a b", b"a\0", b"\xff")),
    # Fields have names, or none: not both.
    b"l\nk\ntimeout=1\n",
    b"l\nk\n1 lease=1\n",
    b"l\nk\n0 1/2\n",
    b"l\nk\n0 30 1/2\n",
    b"sl\nk\n0 3 1/2\n",
    b"e\nk\n 1/2\n",
    b"se\nk\n3 30 1/2\n",
    b"sacquire\nk\ntimeout=1\n",
    b"srenew\nk\ntoken=abc\n",
    *(b"%b\n_\n_\n" % gone for gone in (b"label", b"owner", b"group", b"keep", b"turn")),
    *(b"%b\nk\nabc\n" % gone for gone in (b"begun", b"confirm", b"detach", b"sunbegun", b"spass")),
    b"unbegun\nk\na b\n",
    b"unbegun\nk\n\n",
    b"i\n\n_\n",
    b"evict\nk\n18446744073709551616\n",
    b"evict\nk\n-1\n",
    b"evict\nk\n\n",
    b"pause\na key\n\n",
    b"pause\nk\n_\n",
    b"pause\nk\nfor=0\n",
    b"pause\nk\nfor=9223372037\n",
    b"pause\nk\nfor=1 for=2\n",
    b"pause\nk\nby=\n",
    b"pause\nk\nreason=\n",
    b"pause\nk\nreason=\xff\n",
    b"pause\nk\nby=%b\n" % (b"n" * 257),
    b"pause\nk\nreason=%b\n" % (b"r" * 257),
    b"pause\nk\nlabel=me\n",
    b"resume\na key\n_\n",
    b"find\nsome\nx\n",
    b"find\n_\n\xff\n",
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
    b"pass\nk\n\n",
    b"pass\n\n0af3\n",
    b"pass\nk\na b\n",
    b"pass\nk\n" + b"a" * 65 + b"\n",
    b"age\n\n_\n",
    b"age\na b\n_\n",
    b"listen\nk\n\n",
    b"listen\nk\na b\n",
    b"listen\n\n" + TOKEN + b"\n",
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
        b"acquire\nk\ntimeout=%b\n",
        b"acquire\nk\ntimeout=1 limit=%b\n",
        b"acquire\nk\ntimeout=1 lease=%b\n",
        b"acquire\nk\ntimeout=1 rate=%b/1\n",
        b"acquire\nk\ntimeout=1 rate=1/%b\n",
        b"acquire\nk\ntimeout=1 away=%b hold=1\n",
        b"acquire\nk\ntimeout=1 away=1 hold=%b\n",
        b"enqueue\nk\nowner=me attempt=%b\n",
        b"enqueue\nk\ngroup=g group-limit=%b\n",
        b"enqueue\nk\nturn=%b\n",
        b"wait\nk\ntimeout=%b\n",
        b"renew\nk\ntoken=abc lease=%b\n",
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


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize(
    ("command", "limit"),
    [
        (b"acquire", MAX_FIELDS),
        (b"enqueue", MAX_FIELDS),
        (b"wait", MAX_FIELDS),
        (b"renew", MAX_FIELDS),
        (b"hello", MAX_HELLO),
        *((command, MAX_LINE) for command in (b"l", b"sn", b"unbegun", b"pass", b"find", b"x")),
    ],
)
def test_how_long_an_argument_may_be(command: bytes, limit: int, end: bytes) -> None:
    """Within its bound it is an answer, whatever it says; beyond it, the end of the connection."""
    for key, length, too_long in (
        (b"k", limit, False),
        (b"k", limit + 1, True),
        (b"k" * MAX_LINE, 1, False),
        (b"k" * (MAX_LINE + 1), 1, True),
    ):
        frame = command + end + key + end + b"x" * length + end
        for pieces in ([frame], [frame[:20], frame[20:-2], frame[-2:-1], frame[-1:]]):
            requests, gave_up = read(*pieces)
            assert gave_up is too_long
            assert len(requests) == (not too_long)


def test_all_fields_at_their_longest_are_within_the_bound() -> None:
    """So no client has to count: what is within its own bound can be sent together with the rest."""
    owner = Owner(b"o" * MAX_OWNER, MAX_ATTEMPT, MAX_AGE)
    request = Acquire(
        *(LOCK, b"k" * MAX_LINE, MAX_LIMIT, MAX_SECONDS, MAX_SECONDS, Rate(MAX_RATE, MAX_SECONDS)),
        *(owner, b"l" * MAX_LINE, FairGroup(b"g" * MAX_LINE, MAX_LIMIT, ALL), b"t" * MAX_TICKET),
        Reserve(MAX_SECONDS, MAX_SECONDS),
    )
    assert read(encode_request(request)) == ([request], False)
    assert (
        read(encode_request(Hello(b"i" * MAX_OWNER, b"v" * MAX_OWNER, b"s" * MAX_SECRET)))[1]
        is False
    )


def test_endless_line_is_refused_while_it_comes_in() -> None:
    assert read(b"l\n" + b"k" * (MAX_LINE + 2)) == ([], True)
    assert read(b"auth\n_\n" + b"s" * (MAX_SECRET + 2)) == ([], True)
    assert read(b"acquire\nk\n" + b"s" * (MAX_FIELDS + 2)) == ([], True)
    assert read(b"hello\nk\n" + b"s" * (MAX_HELLO + 2)) == ([], True)
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
    for request in (Auth(b"sesame"), Hello(b"here", b"1", b"sesame")):
        assert "sesame" not in repr(request)


def test_a_nonce_is_letters_and_digits() -> None:
    for nonce in (b"", b"a b", b"x" * 65):
        assert isinstance(read_one(b"identify\n_\n%b\n" % nonce), Malformed)
    assert read_one(b"identify\n_\n%b\n" % (b"x" * 64)) == Identify(b"x" * 64)


def test_the_longest_key() -> None:
    assert key_problem(b"k" * MAX_LINE) is None
    assert key_problem(b"k" * (MAX_LINE + 1)) == "has 257 bytes, 256 are allowed"
