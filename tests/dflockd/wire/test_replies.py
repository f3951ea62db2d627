"""Replies on the wire: literal bytes, and strict parsers for what each request expects."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflockd.wire import (
    FEATURES,
    MAX_SECONDS,
    Aged,
    Enqueued,
    Granted,
    Moved,
    OwnerConflict,
    Queued,
    Recovering,
    Renewed,
    Reply,
    ReplyReader,
    Report,
    Status,
    Superseded,
    TimedOut,
    UnexpectedReplyError,
    Unwelcome,
    Welcome,
    YourTurn,
    encode_reply,
    parse_aged,
    parse_done,
    parse_enqueued,
    parse_granted,
    parse_hello,
    parse_map,
    parse_renewed,
    parse_report,
    parse_turn,
)
from dflockd.wire import replies as module
from dflockd.wire.replies import MAX_REPLY

TOKEN = b"0123456789abcdef0123456789abcdef"

LINES: list[tuple[Reply, bytes]] = [
    (Granted(TOKEN, 33), b"ok " + TOKEN + b" 33\n"),
    (Enqueued(TOKEN, 1), b"acquired " + TOKEN + b" 1\n"),
    (Renewed(60), b"ok 60\n"),
    (Report(b'{"connections":0}'), b'ok {"connections":0}\n'),
    (Status.OK, b"ok\n"),
    (Status.QUEUED, b"queued\n"),
    (Status.TIMEOUT, b"timeout\n"),
    (TimedOut(b"0af3"), b"timeout 0af3\n"),
    (Queued(b"0af3"), b"queued 0af3\n"),
    (YourTurn(b"0af3"), b"turn 0af3\n"),
    (Status.ERROR, b"error\n"),
    (Status.AUTH, b"error_auth\n"),
    (Status.MAX_LOCKS, b"error_max_locks\n"),
    (Status.MAX_WAITERS, b"error_max_waiters\n"),
    (Status.MAX_HOLDS, b"error_max_holds\n"),
    (Status.MAX_RATES, b"error_max_rates\n"),
    (Status.RATE_WINDOW, b"error_rate_window\n"),
    (Status.LIMIT_MISMATCH, b"error_limit_mismatch\n"),
    (Status.ALREADY_ENQUEUED, b"error_already_enqueued\n"),
    (Status.NOT_ENQUEUED, b"error_not_enqueued\n"),
    (Status.LEASE_EXPIRED, b"error_lease_expired\n"),
    (Status.DRAINING, b"error_draining\n"),
    (Recovering(29_870), b"error_recovering 29870\n"),
    (Recovering(200, b"cut off"), b"error_recovering 200 cut off\n"),
    (OwnerConflict(b"held", 0), b"error_owner held 0\n"),
    (OwnerConflict(b"waiting", 2147483647), b"error_owner waiting 2147483647\n"),
    (Superseded(1, b"task 7"), b"error_superseded 1 task 7\n"),
    (Superseded(2**64 - 1, b""), b"error_superseded 18446744073709551615 _\n"),
    (Welcome(b"0.1.0", FEATURES), b"hello ok 0.1.0 ages,groups,pauses,rates,slots,turns,weights\n"),
    (Welcome(b"9", frozenset({b"slots"})), b"hello ok 9 slots\n"),
    (Unwelcome(Status.AUTH), b"hello error_auth\n"),
    (Unwelcome(Status.ERROR), b"hello error\n"),
    (Aged(2**64 - 1), b"ok 18446744073709551615\n"),
    (Moved(8191, 7, b"10.0.0.1:6388"), b"error_moved 8191 7 10.0.0.1:6388\n"),
    (Moved(0, 0, b"[::1]:1", b"0af3"), b"error_moved 0 0 [::1]:1 0af3\n"),
]

ERRORS = [status for status in Status if status.value.startswith(b"error")]

# A parser, and what it takes besides errors.
PARSERS: list[tuple[Callable[[bytes], Reply], set[bytes]]] = [
    (parse_granted, {b"ok " + TOKEN + b" 33", b"timeout", b"timeout 0af3"}),
    (parse_turn, {b"turn 0af3"}),
    (parse_enqueued, {b"acquired " + TOKEN + b" 1", b"queued", b"queued 0af3"}),
    (parse_renewed, {b"ok 60", b"ok 0"}),
    (parse_aged, {b"ok 60", b"ok 18446744073709551615"}),
    (parse_report, {b'ok {"connections":0}'}),
    (parse_map, {b'ok {"connections":0}', b"ok"}),
    (parse_done, {b"ok"}),
]


@pytest.mark.parametrize(("reply", "line"), LINES)
def test_is_sent(reply: Reply, line: bytes) -> None:
    assert encode_reply(reply) == line


def test_every_status_is_known_by_its_bytes() -> None:
    assert {reply for reply, _ in LINES if isinstance(reply, Status)} == set(Status)


def test_nothing_else_is_sent() -> None:
    with pytest.raises(KeyError):
        encode_reply(b"ok")  # type: ignore[arg-type]


@pytest.mark.parametrize(("parse", "_taken"), PARSERS)
def test_every_request_may_be_answered_that_the_server_recovers(
    parse: Callable[[bytes], Reply], _taken: set[bytes]
) -> None:
    assert parse(b"error_recovering 0") == Recovering(0)
    assert parse(b"error_recovering 29870") == Recovering(29_870)
    assert parse(b"error_recovering 200 cut off") == Recovering(200, b"cut off")
    for line in (b"", b" ", b" -1", b" 1.5", b" 1 2", b" 1s", b" 99999999999", b"  1", b"_1"):
        with pytest.raises(UnexpectedReplyError):
            parse(b"error_recovering" + line)


@pytest.mark.parametrize(("parse", "_taken"), PARSERS)
def test_every_request_may_be_answered_that_the_key_is_elsewhere(
    parse: Callable[[bytes], Reply], _taken: set[bytes]
) -> None:
    assert parse(b"error_moved 5 9 h:1") == Moved(5, 9, b"h:1")
    assert parse(b"error_moved 5 9 h:1 a0") == Moved(5, 9, b"h:1", b"a0")
    for line in (b"", b" 1", b" 1 2", b" 1 2 ", b" 1 2 h:1 ", b" -1 2 h:1", b" x 2 h:1"):
        with pytest.raises(UnexpectedReplyError):
            parse(b"error_moved" + line)
    for line in (b" 1 2  h:1", b" 1 2 h:1 a b", b" 1 2 h:1 \xff", b" 1234567890 2 h:1"):
        with pytest.raises(UnexpectedReplyError):
            parse(b"error_moved" + line)


@pytest.mark.parametrize(("parse", "_taken"), PARSERS)
def test_every_request_may_be_answered_that_its_owner_is_there(
    parse: Callable[[bytes], Reply], _taken: set[bytes]
) -> None:
    assert parse(b"error_owner held 3") == OwnerConflict(b"held", 3)
    assert parse(b"error_owner waiting 0") == OwnerConflict(b"waiting", 0)
    assert parse(b"error_superseded 7 a b") == Superseded(7, b"a b")
    for line in (b"", b" 7", b" 7 ", b" -1 a", b" a"):
        with pytest.raises(UnexpectedReplyError):
            parse(b"error_superseded" + line)
    for line in (b"", b" held", b" held ", b" held -1", b" gone 1", b" held 1 2", b" held  1"):
        with pytest.raises(UnexpectedReplyError):
            parse(b"error_owner" + line)


@pytest.mark.parametrize(("parse", "_taken"), PARSERS)
@pytest.mark.parametrize("status", ERRORS)
def test_every_request_may_be_answered_by_an_error(
    parse: Callable[[bytes], Reply], _taken: set[bytes], status: Status
) -> None:
    assert parse(status.value) is status


@pytest.mark.parametrize(("parse", "taken"), PARSERS)
def test_parsers_take_only_what_fits(parse: Callable[[bytes], Reply], taken: set[bytes]) -> None:
    everything = {line for _, lines in PARSERS for line in lines}
    for line in everything:
        if line in taken:
            assert encode_reply(parse(line)) == line + b"\n"
        else:
            with pytest.raises(UnexpectedReplyError):
                parse(line)


def test_hello_is_answered_in_words_of_its_own() -> None:
    for line in (
        b"hello ok 0.1.0 ages,groups,pauses,rates,slots,turns,weights",
        b"hello ok 9 slots",
    ):
        assert encode_reply(parse_hello(line)) == line + b"\n"
    assert parse_hello(b"hello ok 9 slots,more") == Welcome(b"9", frozenset({b"slots", b"more"}))
    for status in ERRORS:
        assert parse_hello(b"hello " + status.value) == Unwelcome(status)
        assert parse_hello(status.value) is status, "from a server that does not know it"
    for wrong in (b"", b" ", b" ok", b" ok 9", b" ok  slots", b" ok 9 slots more", b" ok 9 \xff"):
        with pytest.raises(UnexpectedReplyError):
            parse_hello(b"hello" + wrong)
    for wrong in (
        b"ok",
        b"queued",
        b"timeout",
        b"hello timeout",
        b"hello queued",
        b"hello hello error",
    ):
        with pytest.raises(UnexpectedReplyError):
            parse_hello(wrong)
    for parse, _ in PARSERS:
        with pytest.raises(UnexpectedReplyError):
            parse(b"hello ok 9 slots")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b" ",
        b"ok ",
        b"OK",
        b" ok",
        b"error ",
        b"error something",
        b"error_unheard_of",
        b"ok  33",
        b"ok " + TOKEN,
        b"ok " + TOKEN + b" 0",
        b"ok " + TOKEN + b" -1",
        b"ok " + TOKEN + b" +5",
        b"ok " + TOKEN + b" 1_0",
        b"ok " + TOKEN + b" " + "٣".encode(),
        b"ok " + TOKEN + b" 33 7",
        b"ok " + TOKEN + b"  33",
        b"ok " + TOKEN + b" %d" % (MAX_SECONDS + 1),
        b"ok -5",
        b"ok 99999999999",
        b"acquired  33",
        b"acquired " + TOKEN + b" 0",
        b"acquired " + TOKEN,
        b"timeout ",
        b"timeout  0af3",
        b"timeout 0af3 ",
        b"timeout 0af3 33",
        b"timeout -",
        b"timeout \xff",
        b"timeouts",
        b"turn",
        b"turn ",
        b"turn  0af3",
        b"turn 0af3 33",
        b"turn \xff",
        b"turned 0af3",
        b"ok [1]",
        b"\xff\xfe",
    ],
)
def test_nearly_right_is_wrong(line: bytes) -> None:
    for parse, _ in PARSERS:
        if parse is parse_aged and line == b"ok 99999999999":
            continue  # an age has more digits than any time
        with pytest.raises(UnexpectedReplyError):
            parse(line)


def feed(*pieces: bytes) -> list[bytes] | None:
    """Return the lines that a reader makes of the pieces, ``None`` if it refuses them."""
    reader = ReplyReader()
    lines = []
    reader.owed = 1
    for piece in pieces:
        try:
            line = reader.receive(piece)
        except UnexpectedReplyError:
            return None
        if line is not None:
            lines.append(line)
    return lines


@pytest.mark.parametrize(("reply", "line"), LINES)
def test_a_line_may_be_cut_anywhere(reply: Reply, line: bytes) -> None:
    for end in (b"\n", b"\r\n"):
        data = line[:-1] + end
        assert feed(data) == [line[:-1]]
        assert feed(*[data[i : i + 1] for i in range(len(data))]) == [line[:-1]]
        for cut in range(len(data) + 1):
            assert feed(data[:cut], data[cut:]) == [line[:-1]]


def test_replies_to_earlier_requests_are_passed_over_wherever_they_are_cut() -> None:
    data = b"ok\r\nerror\nok 33\n"
    for cut in range(len(data) + 1):
        reader = ReplyReader()
        reader.owed = 3
        lines = [line for piece in (data[:cut], data[cut:]) if (line := reader.receive(piece))]
        assert lines == [b"ok 33"]
        assert reader.owed == 0


def test_there_is_room_for_a_long_reply_once_one_has_begun() -> None:
    reader = ReplyReader()
    reader.owed = 1
    first = reader.room
    assert reader.receive(b"x" * first) is None
    assert reader.room >= 100 * first
    assert reader.receive(b"y\n") == b"x" * first + b"y"
    assert reader.room == first


@pytest.mark.parametrize("data", [b"ok\nok\n", b"ok\nerr", b"\n\n"])
def test_more_than_was_asked_for(data: bytes) -> None:
    assert feed(data) is None


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_longest_line_is_exact(end: bytes) -> None:
    line = b"x" * MAX_REPLY
    for cut in (0, MAX_REPLY - 1, MAX_REPLY, MAX_REPLY + len(end) - 1):
        assert feed((line + end)[:cut], (line + end)[cut:]) == [line]
    line += b"x"
    for cut in (0, MAX_REPLY - 1, MAX_REPLY, MAX_REPLY + 1, MAX_REPLY + len(end)):
        assert feed((line + end)[:cut], (line + end)[cut:]) is None


def test_endless_line_is_refused_while_it_comes_in() -> None:
    assert feed(b"x" * (MAX_REPLY + 2)) is None


# Any reply, any bytes.

tokens = st.from_regex(rb"[0-9a-f]{32}", fullmatch=True)
leases = st.integers(1, MAX_SECONDS)


@given(tokens, leases)
def test_what_is_sent_is_read(token: bytes, lease: int) -> None:
    granted, enqueued, renewed = Granted(token, lease), Enqueued(token, lease), Renewed(lease)
    assert parse_granted(encode_reply(granted)[:-1]) == granted
    assert parse_granted(encode_reply(TimedOut(token))[:-1]) == TimedOut(token)
    assert parse_enqueued(encode_reply(Queued(token))[:-1]) == Queued(token)
    assert parse_turn(encode_reply(YourTurn(token))[:-1]) == YourTurn(token)
    assert parse_enqueued(encode_reply(enqueued)[:-1]) == enqueued
    assert parse_renewed(encode_reply(renewed)[:-1]) == renewed


words = st.sampled_from([*b"ok acquired error timeout queued turn 33 0 {} _".split(), TOKEN, b" "])
lines = st.binary(max_size=60) | st.lists(words, max_size=6).map(b" ".join)
lines = lines | st.lists(words, max_size=6).map(b"".join)


def check_line(line: bytes) -> None:
    for parse, _ in PARSERS:
        try:
            reply = parse(line)
        except UnexpectedReplyError:
            continue
        # Digits may have leading zeros; everything else is the same bytes again.
        again = encode_reply(reply)[:-1]
        assert again == line or parse(again) == reply


@given(lines)
def test_any_line_has_a_defined_meaning(line: bytes) -> None:
    check_line(line)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_fuzz_for_a_minute() -> None:
    end = time.monotonic() + 60

    @settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
    @given(lines)
    def fuzz(line: bytes) -> None:
        check_line(line)

    while time.monotonic() < end:
        fuzz()


def test_few_leases_are_kept() -> None:
    for lease in range(1, 10 * module.MOST_TAILS):
        assert encode_reply(Granted(b"t", lease)) == b"ok t %d\n" % lease
        assert encode_reply(Enqueued(b"t", lease)) == b"acquired t %d\n" % lease
        assert encode_reply(Renewed(lease)) == b"ok %d\n" % lease
        assert len(module._tails) <= module.MOST_TAILS


def test_few_leases_are_remembered_as_they_were_read() -> None:
    for lease in range(1, 2 * module.MOST_LEASES):
        for _ in range(2):
            assert module.read_grant(b"ok t %d" % lease) == (b"t", lease)
        assert len(module._leases) <= module.MOST_LEASES
