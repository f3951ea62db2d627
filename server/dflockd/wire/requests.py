"""Requests: three lines to a message, and a message to three lines."""

from __future__ import annotations

import re
from collections.abc import Callable

from dflockd.wire.messages import (
    MAX_ATTEMPT,
    MAX_LIMIT,
    MAX_LINE,
    MAX_OWNER,
    MAX_REF,
    MAX_SECONDS,
    MAX_SECRET,
    MAX_TICKET,
    Acquire,
    Auth,
    Barrier,
    Confirm,
    Detach,
    Enqueue,
    Evict,
    Identify,
    Inspect,
    Label,
    Malformed,
    Owner,
    Pass,
    Ping,
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
    Wait,
)
from dflockd.wire.tokens import MAX_FENCE

_forbidden_in_key = re.compile(rb"[\0\t\r\n ]").search
_printable_ascii = re.compile(rb"[!-~]{1,%d}" % MAX_REF).fullmatch
_is_owner = re.compile(rb"[!-~]{1,%d}" % MAX_OWNER).fullmatch
_ANY = b"_"
"""Stands where nothing is to be said."""
_PACKED = b"zlib"
_is_ticket = re.compile(rb"[0-9A-Za-z]{1,%d}" % MAX_TICKET).fullmatch


class FrameTooLongError(Exception):
    """A line is over its limit: where the next request starts can no longer be known."""


class _MalformedError(Exception):
    pass


class RequestReader:
    """Cuts the bytes that a peer sent into requests.

    Feed it with `receive`, then take requests with `next_request` until it returns ``None``. Taking
    is separate from feeding because a request that waits holds up those behind it.
    """

    __slots__ = ("_lines", "_tail", "_taken", "in_frame")

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._taken = 0
        self._tail = b""
        self.in_frame = False
        """Whether a request has begun and not ended: the one time when silence is a fault."""

    def receive(self, data: bytes) -> None:
        """Take in what was read, cut anywhere."""
        if self._tail:
            data = self._tail + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        lines = data.split(b"\n")
        self._tail = lines.pop()
        if self._taken < len(self._lines):
            lines = self._lines[self._taken :] + lines
        self._lines = lines
        self._taken = 0
        # It stays so until more comes: whoever takes requests takes three lines at a time.
        self.in_frame = bool(self._tail) or len(lines) % 3 != 0

    def next_request(self) -> Request | None:
        """Return the next request, or ``None`` until more bytes come.

        Raises:
            FrameTooLongError: a line is over its limit; the stream is of no more use.
        """
        taken, lines = self._taken, self._lines
        if len(lines) - taken < 3:
            if self.in_frame:
                self._check_unfinished(lines[taken:])
            return None
        command, key, argument = lines[taken : taken + 3]
        self._taken = taken + 3
        if len(command) > MAX_LINE or len(key) > MAX_LINE or len(argument) > MAX_LINE:
            _check_lengths([command, key, argument])
        parse = _PARSERS.get(command)
        if parse is None:
            return Malformed("unknown command")
        try:
            return parse(key, argument)
        except _MalformedError as exc:
            return Malformed(str(exc))

    def put_back(self) -> None:
        """Let the request that was taken last be the next one again."""
        self._taken -= 3

    @property
    def has_request(self) -> bool:
        """Whether a whole request waits to be taken."""
        return len(self._lines) - self._taken >= 3

    @property
    def pending(self) -> int:
        """Bytes received and not taken yet."""
        return sum(len(line) + 1 for line in self._lines[self._taken :]) + len(self._tail)

    def _check_unfinished(self, lines: list[bytes]) -> None:
        # An endless line must be refused while it comes in, not once it has filled the memory.
        if lines or len(self._tail) > MAX_LINE:
            # A carriage return at the end may yet prove to belong to the line feed.
            _check_lengths([*lines, self._tail.removesuffix(b"\r")])


def _check_lengths(lines: list[bytes]) -> None:
    for number, line in enumerate(lines):
        limit = MAX_SECRET if number == 2 and lines[0] == b"auth" else MAX_LINE
        if len(line) > limit:
            raise FrameTooLongError(f"line {number + 1} of a request is over {limit} bytes")


def key_problem(key: bytes) -> str | None:
    """Say in a few words why `key` cannot be sent, or return ``None`` if it can."""
    if not key:
        return "is empty"
    if len(key) > MAX_LINE:
        return f"has {len(key)} bytes, {MAX_LINE} are allowed"
    if _forbidden_in_key(key):
        return "contains white space or NUL"
    if not key.isascii():
        try:
            key.decode()
        except UnicodeDecodeError:
            return "is not UTF-8"
    return None


# One parser for each command. Digits are ASCII and numbers are bounded: ``int()`` alone would take
# ``1_0``, other alphabets' digits and numbers without end.


def _key(key: bytes) -> bytes:
    problem = key_problem(key)
    if problem:
        raise _MalformedError(f"key {problem}")
    return key


def _number(text: bytes, lowest: int, highest: int = MAX_SECONDS) -> int:
    if text.isdigit() and len(text) <= 10 and lowest <= (number := int(text)) <= highest:
        return number
    raise _MalformedError("number missing, malformed or out of range")


def _fields(argument: bytes, least: int, most: int) -> list[bytes]:
    fields = argument.split()
    if not least <= len(fields) <= most:
        raise _MalformedError("wrong number of fields")
    return fields


def _acquire_lock(key: bytes, argument: bytes) -> Request:
    fields = _fields(argument, 1, 2)
    lease = _number(fields[1], 1) if len(fields) == 2 else None
    return Acquire(Space.LOCK, _key(key), 1, _number(fields[0], 0), lease)


def _acquire_semaphore(key: bytes, argument: bytes) -> Request:
    fields = _fields(argument, 2, 3)
    lease = _number(fields[2], 1) if len(fields) == 3 else None
    limit = _number(fields[1], 1, MAX_LIMIT)
    return Acquire(Space.SEMAPHORE, _key(key), limit, _number(fields[0], 0), lease)


def _enqueue_lock(key: bytes, argument: bytes) -> Request:
    fields = _fields(argument, 0, 1)
    return Enqueue(Space.LOCK, _key(key), 1, _number(fields[0], 1) if fields else None)


def _enqueue_semaphore(key: bytes, argument: bytes) -> Request:
    fields = _fields(argument, 1, 2)
    lease = _number(fields[1], 1) if len(fields) == 2 else None
    return Enqueue(Space.SEMAPHORE, _key(key), _number(fields[0], 1, MAX_LIMIT), lease)


def _wait(space: Space) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        return Wait(space, _key(key), _number(_fields(argument, 1, 1)[0], 0))

    return parse


def _release(space: Space) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        return Release(space, _key(key), _fields(argument, 1, 1)[0])

    return parse


def _renew(
    space: Space, message: type[Renew | Detach | Confirm] = Renew
) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        fields = _fields(argument, 1, 2)
        lease = _number(fields[1], 1) if len(fields) == 2 else None
        return message(space, _key(key), fields[0], lease)

    return parse


def _stable_ref(ref: bytes, _argument: bytes) -> Request:
    if not _printable_ascii(ref):
        raise _MalformedError(f"a ref is 1 to {MAX_REF} printable ASCII characters")
    return StableRef(ref)


def _printable(text: bytes) -> bytes:
    try:
        printable = text.decode().isprintable()
    except UnicodeDecodeError:
        printable = False
    if not printable:
        raise _MalformedError("a label is printable UTF-8")
    return text


def _label(_key: bytes, text: bytes) -> Request:
    return Label(_printable(text))


def _owner(text: bytes, argument: bytes) -> Request:
    label = None if text == _ANY else _printable(text)
    if argument == _ANY:
        return Owner(b"", 0, b"", label)
    fields = _fields(argument, 2, 3)
    name, attempt, instance = fields if len(fields) == 3 else (*fields, b"")
    if not (_is_owner(name) and (_is_owner(instance) or len(fields) == 2)):
        raise _MalformedError(f"an owner is 1 to {MAX_OWNER} printable ASCII characters")
    return Owner(name, _number(attempt, 0, MAX_ATTEMPT), instance, label)


def _inspect(space: Space) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, _argument: bytes) -> Request:
        return Inspect(space, _key(key))

    return parse


def _evict(space: Space) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        if not (argument.isdigit() and len(argument) <= 20 and int(argument) <= MAX_FENCE):
            raise _MalformedError("no fence")
        return Evict(space, _key(key), int(argument))

    return parse


def _identify(_key: bytes, nonce: bytes) -> Request:
    if not _is_ticket(nonce):
        raise _MalformedError(f"a nonce is 1 to {MAX_TICKET} letters and digits")
    return Identify(nonce)


def _ticket(text: bytes) -> bytes:
    if not _is_ticket(text):
        raise _MalformedError(f"a ticket is 1 to {MAX_TICKET} letters and digits")
    return text


def _resume(_key: bytes, ticket: bytes) -> Request:
    return Resume(_ticket(ticket))


def _reserve(_key: bytes, argument: bytes) -> Request:
    away, hold = _fields(argument, 2, 2)
    return Reserve(_number(away, 0), _number(hold, 0))


def _turn(_key: bytes, argument: bytes) -> Request:
    return Turn(_number(_fields(argument, 1, 1)[0], 0))


def _pass(space: Space) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, ticket: bytes) -> Request:
        return Pass(space, _key(key), _ticket(ticket))

    return parse


def _shards(_key: bytes, argument: bytes) -> Request:
    # Anything may stand here, and what is no version is that of no map.
    version, *others = argument.split() or [_ANY]
    return Shards(b"" if version == _ANY else version, others == [_PACKED])


_PARSERS: dict[bytes, Callable[[bytes, bytes], Request]] = {
    b"l": _acquire_lock,
    b"r": _release(Space.LOCK),
    b"n": _renew(Space.LOCK),
    b"e": _enqueue_lock,
    b"w": _wait(Space.LOCK),
    b"sl": _acquire_semaphore,
    b"sr": _release(Space.SEMAPHORE),
    b"sn": _renew(Space.SEMAPHORE),
    b"se": _enqueue_semaphore,
    b"sw": _wait(Space.SEMAPHORE),
    b"stats": lambda _key, _argument: Stats(),
    b"auth": lambda _key, argument: Auth(argument),
    b"ping": lambda _key, _argument: Ping(),
    b"barrier": lambda _key, _argument: Barrier(),
    b"stable-ref": _stable_ref,
    b"label": _label,
    b"owner": _owner,
    b"i": _inspect(Space.LOCK),
    b"si": _inspect(Space.SEMAPHORE),
    b"detach": _renew(Space.LOCK, Detach),
    b"sdetach": _renew(Space.SEMAPHORE, Detach),
    b"confirm": _renew(Space.LOCK, Confirm),
    b"sconfirm": _renew(Space.SEMAPHORE, Confirm),
    b"evict": _evict(Space.LOCK),
    b"sevict": _evict(Space.SEMAPHORE),
    b"shards": _shards,
    b"identify": _identify,
    b"resume": _resume,
    b"keep": _reserve,
    b"turn": _turn,
    b"pass": _pass(Space.LOCK),
    b"spass": _pass(Space.SEMAPHORE),
}


def encode_request(request: Request) -> bytes:
    """Return the three lines of `request`.

    The values are trusted to be sendable: check a key with `key_problem` first.
    """
    # Those of every lock first: it looks through the cases in order.
    match request:
        case Acquire(Space.LOCK, key, _, timeout, lease):
            return b"l\n%b\n%b\n" % (key, _numbers(timeout, lease))
        case Acquire(_, key, limit, timeout, lease):
            return b"sl\n%b\n%b\n" % (key, _numbers(timeout, limit, lease))
        case Release(space, key, token):
            return b"%br\n%b\n%b\n" % (_PREFIXES[space], key, token)
        case Enqueue(Space.LOCK, key, _, lease):
            return b"e\n%b\n%b\n" % (key, _numbers(lease))
        case Enqueue(_, key, limit, lease):
            return b"se\n%b\n%b\n" % (key, _numbers(limit, lease))
        case Label(text):
            return b"label\n_\n%b\n" % text
        case Owner(name, attempt, instance, label):
            who = b"%b %d %b" % (name, attempt, instance) if name else _ANY
            return b"owner\n%b\n%b\n" % (_ANY if label is None else label, who.rstrip())
        case Renew(space, key, token, lease):
            return _renewal(b"n", space, key, token, lease)
        case Detach(space, key, token, lease):
            return _renewal(b"detach", space, key, token, lease)
        case Confirm(space, key, token, lease):
            return _renewal(b"confirm", space, key, token, lease)
        case Wait(space, key, timeout):
            return b"%bw\n%b\n%d\n" % (_PREFIXES[space], key, timeout)
        case Auth(secret):
            return b"auth\n_\n%b\n" % secret
        case StableRef(ref):
            return b"stable-ref\n%b\n_\n" % ref
        case Stats():
            return b"stats\n_\n_\n"
        case Ping():
            return b"ping\n_\n_\n"
        case Barrier():
            return b"barrier\n_\n_\n"
        case Inspect(space, key):
            return b"%bi\n%b\n_\n" % (_PREFIXES[space], key)
        case Evict(space, key, fence):
            return b"%bevict\n%b\n%d\n" % (_PREFIXES[space], key, fence)
        case Shards(version, packed):
            tail = b" " + _PACKED if packed else b""
            return b"shards\n_\n%b%b\n" % (version or _ANY, tail)
        case Identify(nonce):
            return b"identify\n_\n%b\n" % nonce
        case Resume(ticket):
            return b"resume\n_\n%b\n" % ticket
        case Reserve(away, hold):
            return b"keep\n_\n%d %d\n" % (away, hold)
        case Turn(hold):
            return b"turn\n_\n%d\n" % hold
        case Pass(space, key, ticket):
            return b"%bpass\n%b\n%b\n" % (_PREFIXES[space], key, ticket)
        case Malformed():
            raise ValueError("a malformed request cannot be sent")


_PREFIXES = {Space.LOCK: b"", Space.SEMAPHORE: b"s"}


def _renewal(command: bytes, space: Space, key: bytes, token: bytes, lease: int | None) -> bytes:
    tail = b" %d" % lease if lease is not None else b""
    return b"%b%b\n%b\n%b%b\n" % (_PREFIXES[space], command, key, token, tail)


def _numbers(*numbers: int | None) -> bytes:
    return b" ".join([b"%d" % number for number in numbers if number is not None])
