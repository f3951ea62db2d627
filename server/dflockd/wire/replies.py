"""Replies: a message to one line, and one line to what its request expects."""

from __future__ import annotations

import re
from typing import Final

from dflockd.wire.messages import (
    MAX_AGE,
    MAX_SECONDS,
    Aged,
    Enqueued,
    Granted,
    Moved,
    OwnerConflict,
    Queued,
    Recovering,
    Refusal,
    Renewed,
    Reply,
    Report,
    Status,
    Superseded,
    TimedOut,
    Unwelcome,
    Welcome,
    YourTurn,
)

MAX_REPLY = 1 << 20
"""Longest reply, in bytes: a `Report` can be long, everything else is short."""

_RECOVERING = b"error_recovering "
_TIMED_OUT = re.compile(rb"timeout ([0-9A-Za-z]+)")
_QUEUED = re.compile(rb"queued ([0-9A-Za-z]+)")
_YOUR_TURN = re.compile(rb"turn ([0-9A-Za-z]+)")
_MOVED = re.compile(rb"error_moved ([0-9]{1,9}) ([0-9]{1,9}) ([!-~]{1,255})(?: ([0-9A-Za-z]+))?")
_OWNER = re.compile(rb"error_owner (held|waiting) ([0-9]{1,10})")
_SUPERSEDED = re.compile(rb"error_superseded ([0-9]{1,20}) (.+)")
_AGED = re.compile(rb"ok ([0-9]{1,20})")
_WELCOME = re.compile(rb"hello ok ([!-~]+) ([!-~]+)")
_HELLO = b"hello "
"""What the answers to `Hello` begin with: no other server says so."""
_NO_LABEL = b"_"
"""Stands where who has superseded somebody has not said who it is."""
_STATUSES = {status.value: status for status in Status}


class UnexpectedReplyError(Exception):
    """The peer sent something that is no reply to what was asked."""


_tails: Final[dict[int, bytes]] = {}
"""How replies end that name a lease."""

MOST_TAILS: Final = 256
"""Of those so many are kept: most leases are the same few."""


def _tail(lease: int) -> bytes:
    if len(_tails) >= MOST_TAILS:
        _tails.clear()
    tail = _tails[lease] = b" %d\n" % lease
    return tail


def granted_line(token: bytes, lease: int) -> bytes:
    """Return the line of a `Granted`."""
    return b"ok " + token + (_tails.get(lease) or _tail(lease))


def enqueued_line(token: bytes, lease: int) -> bytes:
    """Return the line of an `Enqueued`."""
    return b"acquired " + token + (_tails.get(lease) or _tail(lease))


def renewed_line(lease: int) -> bytes:
    """Return the line of a `Renewed`."""
    return b"ok" + (_tails.get(lease) or _tail(lease))


def encode_reply(reply: Reply) -> bytes:
    """Return the line of `reply`, with its line feed."""
    if type(reply) is Status:
        return reply.line
    if type(reply) is Granted:
        return granted_line(reply.token, reply.lease)
    if type(reply) is Renewed:
        return renewed_line(reply.lease)
    if type(reply) is Enqueued:
        return enqueued_line(reply.token, reply.lease)
    if type(reply) is Moved:
        tail = b" " + reply.ticket if reply.ticket else b""
        return b"error_moved %d %d %b%b\n" % (reply.shard, reply.epoch, reply.server, tail)
    if type(reply) is Superseded:
        return b"error_superseded %d %b\n" % (reply.age, reply.label or _NO_LABEL)
    if type(reply) is Welcome:
        return b"hello ok %b %b\n" % (reply.version, b",".join(sorted(reply.features)))
    if type(reply) is Unwelcome:
        return _HELLO + reply.status.line
    if type(reply) is Recovering:
        status = b" " + reply.status if reply.status else b""
        return b"error_recovering %d%b\n" % (reply.milliseconds, status)
    return _LINES[type(reply)] % reply


_LINES: Final[dict[type, bytes]] = {
    Report: b"ok %b\n",
    TimedOut: b"timeout %b\n",
    Queued: b"queued %b\n",
    YourTurn: b"turn %b\n",
    Aged: b"ok %d\n",
    OwnerConflict: b"error_owner %b %d\n",
}


MOST_LEASES = 64
"""So many leases are remembered as they were read: servers grant the same few."""

_leases: dict[bytes, int] = {}


SHORT_READ, LONG_READ = 256, 65536
"""Bytes to read at once of a reply, and of one that turns out to be long. Room for a long one costs as
much as all else that is done to read a short one, and nearly all are short."""


class ReplyReader:
    """Cuts the bytes that a server sent into reply lines."""

    __slots__ = ("_buffer", "owed", "room")

    def __init__(self) -> None:
        self._buffer = b""
        self.owed = 0
        """Requests that were sent and are still to be answered. The latest is waited for: replies to
        those before it are passed over."""
        self.room = SHORT_READ
        """How many bytes to read next."""

    def receive(self, data: bytes) -> bytes | None:
        """Take in what was read and return the line it completes, or ``None`` until more comes.

        Raises:
            UnexpectedReplyError: more lines than are owed, or an endless one: nobody asked for that.
        """
        if self._buffer:
            data = self._buffer + data
        line, end, rest = data.partition(b"\n")
        while end and self.owed > 1:
            self.owed -= 1
            line, end, rest = rest.partition(b"\n")
        reply = line.removesuffix(b"\r")
        if rest or len(reply) > MAX_REPLY:
            raise UnexpectedReplyError("more in reply than one line")
        if end:
            if not self.owed:
                raise UnexpectedReplyError("a line that nobody asked for")
            self._buffer = b""
            self.owed = 0
            self.room = SHORT_READ
            return reply
        self._buffer = line
        self.room = LONG_READ
        return None


# What a line may be depends on what was asked, so there is a parser for each expectation. They are
# strict: a reply that is only nearly right comes from something that is not a lock server.


def parse_hello(line: bytes) -> Welcome | Unwelcome | Status:
    """Read the answer to `Hello`. A server that does not know it answers with a bare `Status`."""
    if welcome := _WELCOME.fullmatch(line):
        return Welcome(welcome[1], frozenset(welcome[2].split(b",")))
    status = _STATUSES.get(line.removeprefix(_HELLO))
    if status in (None, Status.OK, Status.QUEUED, Status.TIMEOUT):
        raise UnexpectedReplyError(f"unexpected reply {line[:80]!r}")
    return Unwelcome(status) if line.startswith(_HELLO) else status


def parse_granted(line: bytes) -> Granted | TimedOut | Refusal:
    """Read the answer to `Acquire` and `Wait`."""
    grant = read_grant(line)
    if grant is not None:
        return Granted(*grant)
    if timed_out := _TIMED_OUT.fullmatch(line):
        return TimedOut(timed_out[1])
    return _status(line, Status.OK, Status.QUEUED)


def parse_turn(line: bytes) -> YourTurn | Refusal:
    """Read the answer to `Next`."""
    if your_turn := _YOUR_TURN.fullmatch(line):
        return YourTurn(your_turn[1])
    return _status(line, Status.OK, Status.QUEUED, Status.TIMEOUT)


GRANTED, ENQUEUED = b"ok", b"acquired"
"""What a grant begins with, of who waits for it and of who takes a position."""


def read_grant(line: bytes, word: bytes = GRANTED) -> tuple[bytes, int] | None:
    """Return the token and the seconds of a grant that begins so; ``None`` if it is another reply."""
    fields = line.split(b" ")
    if len(fields) != 3 or fields[0] != word:
        return None
    _, token, lease = fields
    seconds = _leases.get(lease)
    if seconds is None:
        seconds = _seconds(lease, 1)
        if len(_leases) < MOST_LEASES:
            _leases[lease] = seconds
    if not token.isalnum():
        raise UnexpectedReplyError(f"a grant with the token {token[:80]!r}")
    return token, seconds


def parse_enqueued(line: bytes) -> Enqueued | Queued | Refusal:
    """Read the answer to `Enqueue`."""
    grant = read_grant(line, ENQUEUED)
    if grant is not None:
        return Enqueued(*grant)
    if queued := _QUEUED.fullmatch(line):
        return Queued(queued[1])
    return _status(line, Status.OK, Status.TIMEOUT)


def parse_renewed(line: bytes) -> Renewed | Refusal:
    """Read the answer to `Renew`."""
    fields = line.split(b" ")
    if len(fields) == 2 and fields[0] == b"ok":
        return Renewed(_seconds(fields[1], 0))
    return _status(line, Status.OK, Status.QUEUED, Status.TIMEOUT)


def parse_aged(line: bytes) -> Aged | Refusal:
    """Read the answer to `DrawAge`."""
    aged = _AGED.fullmatch(line)
    if aged and 1 <= (age := int(aged[1])) <= MAX_AGE:
        return Aged(age)
    return _status(line, Status.OK, Status.QUEUED, Status.TIMEOUT)


def parse_done(line: bytes) -> Refusal:
    """Read the answer to a request that is done or refused: release, auth, ping and the like."""
    return _status(line, Status.QUEUED, Status.TIMEOUT)


def parse_report(line: bytes) -> Report | Refusal:
    """Read the answer to `Stats` and its like; the JSON itself is not looked at."""
    if line.startswith(b"ok {"):
        return Report(line[3:])
    return _status(line, Status.OK, Status.QUEUED, Status.TIMEOUT)


def parse_map(line: bytes) -> Report | Refusal:
    """Read the answer to a `Shards` with a version, which may be `Status.OK`; see `decode_map`."""
    return Report(line[3:]) if line.startswith(b"ok {") else parse_done(line)


def _status(line: bytes, *unfit: Status) -> Refusal:
    status = _STATUSES.get(line)
    if status is None and line.startswith(_RECOVERING):
        wait, space, status_now = line.removeprefix(_RECOVERING).partition(b" ")
        if space and not status_now.replace(b" ", b"").isalpha():
            raise UnexpectedReplyError(f"unexpected reply {line[:80]!r}")
        return Recovering(_seconds(wait, 0, "milliseconds"), status_now)
    if status is None and (moved := _MOVED.fullmatch(line)):
        return Moved(int(moved[1]), int(moved[2]), moved[3], moved[4] or b"")
    if status is None and (conflict := _OWNER.fullmatch(line)):
        return OwnerConflict(conflict[1], int(conflict[2]))
    if status is None and (superseded := _SUPERSEDED.fullmatch(line)):
        label = superseded[2]
        return Superseded(int(superseded[1]), b"" if label == _NO_LABEL else label)
    if status is None or status in unfit:
        raise UnexpectedReplyError(f"unexpected reply {line[:80]!r}")
    return status


def _seconds(text: bytes, lowest: int, unit: str = "seconds") -> int:
    if text.isdigit() and len(text) <= 10 and lowest <= (number := int(text)) <= MAX_SECONDS:
        return number
    raise UnexpectedReplyError(f"unexpected number of {unit} {text[:20]!r}")
