"""Requests: three lines to a message, and a message to three lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

from dflockd.wire import arguments
from dflockd.wire.arguments import Asked, MalformedError, checked_name, checked_ticket
from dflockd.wire.keys import key_problem
from dflockd.wire.messages import (
    MAX_FIELDS,
    MAX_HELLO,
    MAX_LINE,
    MAX_SECRET,
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
    Next,
    Owner,
    Pass,
    Pause,
    Ping,
    Rate,
    Release,
    Renew,
    Request,
    Resume,
    Shards,
    Space,
    StableRef,
    Stats,
    Unbegun,
    Wait,
)
from dflockd.wire.tokens import MAX_FENCE

ANY: Final = b"_"
"""Stands for nothing."""

_PACKED: Final = b"zlib"

# Kinds of requests. What those say that are made all day stands in the reader; of all others there is
# only the message.
OTHER: Final = 0
ENTRY: Final = 1
"""Requests that sign a client in: `Auth` and `Hello`."""
RELEASE: Final = 2
"""Of this one and all that follow there need not be a message."""
RENEW: Final = 3
ACQUIRE: Final = 4
ENQUEUE: Final = 5
WAIT: Final = 6

MOST_KNOWN: Final = 256
"""Arguments of one command that are kept, read: clients use the same few again and again."""

_LOCK, _SEMAPHORE = Space.LOCK, Space.SEMAPHORE
_PREFIXES: Final = {_LOCK: b"", _SEMAPHORE: b"s"}


@final
class Command:
    """How to read a request."""

    __slots__ = ("_read", "_varies", "kind", "known", "longest", "parse", "space")

    def __init__(
        self,
        parse: Callable[[bytes, bytes], Request],
        kind: int = OTHER,
        space: int = 0,
        read: Callable[[bytes], Asked] | None = None,
        *,
        varies: bool = False,
        longest: int = MAX_LINE,
    ) -> None:
        self.parse = parse
        """Makes the message of a key and an argument."""
        self.kind = kind
        self.space = int(space)  # to look something up by an `IntEnum` costs more
        self._read = read
        self._varies = varies
        """Whether hardly two arguments are equal: they say whose run it is."""
        self.longest = longest
        """Bytes that an argument may have."""
        self.known: dict[bytes, Asked] = {}
        """What arguments say."""

    def learn(self, argument: bytes) -> Asked:
        """Return what an argument says that is not known yet.

        Raises:
            MalformedError: nothing that can be meant.
        """
        if self._read is None:
            raise MalformedError("not in numbers")
        asked = self._read(argument)
        if self._varies:
            return asked
        if len(self.known) >= MOST_KNOWN:
            self.known.clear()
        self.known[argument] = asked
        return asked


def _key(key: bytes) -> bytes:
    problem = key_problem(key)
    if problem:
        raise MalformedError(f"key {problem}")
    return key


def _of_a_slot(
    kind: int, space: Space, message: Any, read: Callable[[bytes], Asked], *, named: bool = False
) -> Command:
    """Return the command of a message whose fields, behind the key, are among those of `Asked`."""
    names = message._fields[2:]

    def parse(key: bytes, argument: bytes) -> Request:
        asked = read(argument)
        request: Request = message(space, _key(key), *[getattr(asked, name) for name in names])
        return request

    longest = MAX_FIELDS if named else MAX_LINE
    return Command(parse, kind, space, read, varies=named, longest=longest)


def asked_of(request: Acquire | Enqueue | Wait) -> Asked:
    """Return what a message asks: the fields of it behind the key."""
    asked = Asked()
    for name, value in zip(request._fields[2:], request[2:], strict=True):
        setattr(asked, name, value)
    return asked


def _of_a_key(
    kind: int, space: Space, message: Any, read: Callable[[bytes], tuple[Any, ...]]
) -> Command:
    """Return the command of a message with these fields behind the key."""

    def parse(key: bytes, argument: bytes) -> Request:
        request: Request = message(space, _key(key), *read(argument))
        return request

    return Command(parse, kind, space)


def _token(argument: bytes) -> tuple[bytes]:
    return (arguments.token(argument),)


def _fence(argument: bytes) -> tuple[int]:
    return (arguments.number(argument, 0, MAX_FENCE, 20),)


def _nothing(_argument: bytes) -> tuple[()]:
    return ()


def _hello(instance: bytes, argument: bytes) -> Request:
    return Hello(checked_name(instance), *arguments.hello(argument))


def _pause(key: bytes, argument: bytes) -> Request:
    return Pause(_key(key), *arguments.pause(argument))


_FIND_FLAGS: Final = {b"waiters", b"all"}


def _find(flags: bytes, text: bytes) -> Request:
    said = set() if flags == ANY else set(flags.split(b","))
    if not said <= _FIND_FLAGS:
        raise MalformedError("an unknown flag of find")
    return Find(arguments.label(text), b"waiters" in said, b"all" in said)


def _shards(_key: bytes, argument: bytes) -> Request:
    # Anything may stand here, and what is no version is that of no map.
    version, *others = argument.split() or [ANY]
    return Shards(b"" if version == ANY else version, others == [_PACKED])


_LINES: Final[dict[Any, tuple[bytes, Callable[[bytes], bytes] | None, Any]]] = {
    Unbegun: (b"unbegun", _key, arguments.token),
    Next: (b"next", None, None),
    Pass: (b"pass", _key, checked_ticket),
    DrawAge: (b"age", _key, None),
    Resume: (b"resume", _key, None),
    Listen: (b"listen", _key, arguments.token),
    Identify: (b"identify", None, checked_ticket),
    StableRef: (b"stable-ref", checked_name, None),
    Auth: (b"auth", None, bytes),
    Stats: (b"stats", None, None),
    Ping: (b"ping", None, None),
    Barrier: (b"barrier", None, None),
}
"""Messages of which each field is a line: by which command, and what reads the key and the argument."""


def _of_lines(message: Any) -> Command:
    _, read_key, read_argument = _LINES[message]

    def parse(key: bytes, argument: bytes) -> Request:
        lines = (read_key, key), (read_argument, argument)
        request: Request = message(*[read(line) for read, line in lines if read is not None])
        return request

    if message is Auth:
        return Command(parse, ENTRY, longest=MAX_SECRET)
    return Command(parse, OTHER)


_in_order = arguments.in_order

COMMANDS: Final[dict[bytes, Command]] = {
    # Published.
    b"l": _of_a_slot(ACQUIRE, _LOCK, Acquire, _in_order(1, "timeout", "lease")),
    b"e": _of_a_slot(ENQUEUE, _LOCK, Enqueue, _in_order(0, "lease")),
    b"w": _of_a_slot(WAIT, _LOCK, Wait, _in_order(1, "timeout")),
    b"n": _of_a_key(RENEW, _LOCK, Renew, arguments.token_and_lease),
    b"r": _of_a_key(RELEASE, _LOCK, Release, _token),
    b"sl": _of_a_slot(ACQUIRE, _SEMAPHORE, Acquire, _in_order(2, "timeout", "limit", "lease")),
    b"se": _of_a_slot(ENQUEUE, _SEMAPHORE, Enqueue, _in_order(1, "limit", "lease")),
    b"sw": _of_a_slot(WAIT, _SEMAPHORE, Wait, _in_order(1, "timeout")),
    b"sn": _of_a_key(RENEW, _SEMAPHORE, Renew, arguments.token_and_lease),
    b"sr": _of_a_key(RELEASE, _SEMAPHORE, Release, _token),
    # Of our own clients.
    b"hello": Command(_hello, ENTRY, longest=MAX_HELLO),
    b"acquire": _of_a_slot(ACQUIRE, _LOCK, Acquire, arguments.acquire, named=True),
    b"enqueue": _of_a_slot(ENQUEUE, _LOCK, Enqueue, arguments.enqueue, named=True),
    b"wait": _of_a_slot(WAIT, _LOCK, Wait, arguments.wait, named=True),
    b"renew": _of_a_slot(OTHER, _LOCK, Renew, arguments.renew, named=True),
    b"shards": Command(_shards, OTHER),
    # Of operators.
    b"i": _of_a_key(OTHER, _LOCK, Inspect, _nothing),
    b"si": _of_a_key(OTHER, _SEMAPHORE, Inspect, _nothing),
    b"evict": _of_a_key(OTHER, _LOCK, Evict, _fence),
    b"sevict": _of_a_key(OTHER, _SEMAPHORE, Evict, _fence),
    b"find": Command(_find, OTHER),
    b"pause": Command(_pause, OTHER, longest=MAX_FIELDS),
    # Of all.
    **{command: _of_lines(message) for message, (command, _, _) in _LINES.items()},
}


def parse_request(command: bytes, key: bytes, argument: bytes) -> Request:
    """Return what three lines say, each within its limit."""
    found = COMMANDS.get(command)
    if found is None:
        return Malformed("unknown command")
    try:
        return found.parse(key, argument)
    except MalformedError as exc:
        return Malformed(str(exc))


def encode_request(request: Request) -> bytes:
    """Return the three lines of `request`: published ones, if they can say all of it.

    The values are trusted to be sendable: check a key with `key_problem` first.
    """
    # Those of every lock before all: among the cases they would take a multiple of the time.
    if isinstance(request, Acquire):
        return _encode_acquire(request)
    if isinstance(request, Enqueue):
        return _encode_enqueue(request)
    # Then what comes often: it looks through the cases in order.
    match request:
        case Release(space, key, token):
            return encode_release(space, key, token)
        case Renew(space, key, token, lease, How.PLAIN, None, b"", None):
            tail = b" %d" % lease if lease is not None else b""
            return b"%bn\n%b\n%b%b\n" % (_PREFIXES[space], key, token, tail)
        case Renew(_, key, token, lease, how, owner, label, group):
            said = b"token=%b" % token
            if how is not How.PLAIN:
                said += b" how=%b" % how.value
            said += _slot(1, lease, None, owner, label, group, b"")
            return b"renew\n%b\n%b\n" % (key, said)
        case Wait(space, key, timeout, None, 0):
            return b"%bw\n%b\n%d\n" % (_PREFIXES[space], key, timeout)
        case Wait(_, key, timeout, reserve, age):
            said = b"timeout=%d" % timeout
            if reserve is not None:
                said += b" away=%d hold=%d" % reserve
            if age:
                said += b" age=%d" % age
            return b"wait\n%b\n%b\n" % (key, said)
        case Hello(instance, version, secret):
            said = b"version=%b" % version
            if secret is not None:
                said += b" secret=%b" % secret
            return b"hello\n%b\n%b\n" % (instance, said)
        case Inspect(space, key):
            return b"%bi\n%b\n_\n" % (_PREFIXES[space], key)
        case Find(text, waiters, notes):
            flags = b",".join([b"waiters"] * waiters + [b"all"] * notes)
            return b"find\n%b\n%b\n" % (flags or ANY, text)
        case Evict(space, key, fence):
            return b"%bevict\n%b\n%d\n" % (_PREFIXES[space], key, fence)
        case Pause(key, span, by, reason):
            said = b"" if span is None else b" for=%d" % span
            said += b" by=" + by if by else b""
            said += b" reason=" + reason if reason else b""
            return b"pause\n%b\n%b\n" % (key, said[1:])
        case Shards(version, packed):
            tail = b" " + _PACKED if packed else b""
            return b"shards\n_\n%b%b\n" % (version or ANY, tail)
        case Malformed():
            raise ValueError("a malformed request cannot be sent")
        case _:
            command, has_key, has_argument = _LINES[type(request)]
            lines: list[Any] = [*request]
            key = lines[0] if has_key else ANY
            return b"%b\n%b\n%b\n" % (command, key, lines[-1] if has_argument else ANY)


_NO_MORE_TO_ACQUIRE: Final = Acquire(Space.LOCK, b"", 1, 0, None)[5:]
_NO_MORE_TO_ENQUEUE: Final = Enqueue(Space.LOCK, b"", 1, None)[4:]


def _encode_acquire(request: Acquire) -> bytes:
    space, key, limit, timeout, lease, rate, owner, label, group, ticket, reserve = request
    if request[5:] == _NO_MORE_TO_ACQUIRE:
        if space is Space.SEMAPHORE:
            return b"sl\n%b\n%b\n" % (key, _numbers(timeout, limit, lease))
        if limit == 1:
            return b"l\n%b\n%b\n" % (key, _numbers(timeout, lease))
    said = b"timeout=%d" % timeout
    if reserve is not None:
        said += b" away=%d hold=%d" % reserve
    said += _slot(limit, lease, rate, owner, label, group, ticket)
    return b"acquire\n%b\n%b\n" % (key, said)


def _encode_enqueue(request: Enqueue) -> bytes:
    space, key, limit, lease, rate, owner, label, group, ticket, turn = request
    if request[4:] == _NO_MORE_TO_ENQUEUE:
        if space is Space.SEMAPHORE:
            return b"se\n%b\n%b\n" % (key, _numbers(limit, lease))
        if limit == 1:
            return b"e\n%b\n%b\n" % (key, _numbers(lease))
    said = b"" if turn is None else b" turn=%d" % turn
    said += _slot(limit, lease, rate, owner, label, group, ticket)
    return b"enqueue\n%b\n%b\n" % (key, said[1:])


def encode_release(space: Space, key: bytes, token: bytes) -> bytes:
    """Return the three lines of a `Release`."""
    # Without the format and its table: for a free lock this is nearly all that there is to encode.
    return (b"r\n" if space is _LOCK else b"sr\n") + key + b"\n" + token + b"\n"


def _slot(
    limit: int,
    lease: int | None,
    rate: Rate | None,
    owner: Owner | None,
    label: bytes,
    group: FairGroup | None,
    ticket: bytes,
) -> bytes:
    """Return the fields of who asks for a slot, each behind a space."""
    said = b"" if limit == 1 else b" limit=%d" % limit
    if lease is not None:
        said += b" lease=%d" % lease
    if rate is not None:
        said += b" rate=%d/%d" % rate
    if group is not None:
        if group.name:
            said += b" group=%b" % group.name
        if group.limit:
            said += b" group-limit=%d" % group.limit
        if group.weight != 1:
            said += b" weight=%d" % group.weight
    if owner is not None:  # behind what is the same for all runs: see `arguments.acquire`
        name, attempt, age = owner
        said += b" owner=%b attempt=%d" % (name, attempt)
        if age:
            said += b" age=%d" % age
    if ticket:
        said += b" ticket=%b" % ticket
    return said + b" label=" + label if label else said


def _numbers(*numbers: int | None) -> bytes:
    return b" ".join([b"%d" % number for number in numbers if number is not None])
