"""Requests: three lines to a message, and a message to three lines."""

from __future__ import annotations

import re
from collections.abc import Callable

from dflockd.wire import arguments
from dflockd.wire.arguments import ANY, Asked, MalformedError, fields, number
from dflockd.wire.messages import (
    MAX_LIMIT,
    MAX_LINE,
    MAX_REF,
    MAX_TICKET,
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
    Reserve,
    Resume,
    Shards,
    Space,
    StableRef,
    Stats,
    Turn,
    Unbegun,
    Wait,
)
from dflockd.wire.tokens import MAX_FENCE

_forbidden_in_key = re.compile(rb"[\0\t-\r\x1c-\x20]").search  # as `str.isspace` has it
_printable_ascii = re.compile(rb"[!-~]{1,%d}" % MAX_REF).fullmatch
_PACKED = b"zlib"
_is_ticket = re.compile(rb"[0-9A-Za-z]{1,%d}" % MAX_TICKET).fullmatch


def key_problem(key: bytes) -> str | None:
    """Say in a few words why `key` cannot be sent, or return ``None`` if it can."""
    if not key:
        return "is empty"
    if len(key) > MAX_LINE:
        return f"has {len(key)} bytes, {MAX_LINE} are allowed"
    if key.isascii():
        if _forbidden_in_key(key):
            return "contains white space or NUL"
        return None
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return "is not UTF-8"
    if "\0" in text or text.split() != [text]:
        return "contains white space or NUL"
    return None


# One parser for each command.


def _key(key: bytes) -> bytes:
    problem = key_problem(key)
    if problem:
        raise MalformedError(f"key {problem}")
    return key


def _acquire(space: Space, read: Callable[[bytes], Asked]) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        asked = read(argument)
        return Acquire(space, _key(key), asked.limit, asked.timeout, asked.lease, asked.rate)

    return parse


def _enqueue(space: Space, read: Callable[[bytes], Asked]) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        asked = read(argument)
        return Enqueue(space, _key(key), asked.limit, asked.lease, asked.rate)

    return parse


def _wait(space: Space) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        return Wait(space, _key(key), arguments.wait(argument).timeout)

    return parse


def _release(
    space: Space, message: type[Release | Unbegun] = Release
) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        return message(space, _key(key), arguments.release(argument))

    return parse


def _renew(
    space: Space, message: type[Renew | Begun | Detach | Confirm] = Renew
) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        token, lease = arguments.renew(argument)
        return message(space, _key(key), token, lease)

    return parse


def _stable_ref(ref: bytes, _argument: bytes) -> Request:
    if not _printable_ascii(ref):
        raise MalformedError(f"a ref is 1 to {MAX_REF} printable ASCII characters")
    return StableRef(ref)


def _label(_key: bytes, text: bytes) -> Request:
    return Label(arguments.label(text))


def _inspect(space: Space) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, _argument: bytes) -> Request:
        return Inspect(space, _key(key))

    return parse


_FIND_FLAGS = {b"waiters", b"all"}


def _find(flags: bytes, text: bytes) -> Request:
    said = set() if flags == ANY else set(flags.split(b","))
    if not said <= _FIND_FLAGS:
        raise MalformedError("an unknown flag of find")
    return Find(arguments.label(text), b"waiters" in said, b"all" in said)


def _evict(space: Space) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        if not (argument.isdigit() and len(argument) <= 20 and int(argument) <= MAX_FENCE):
            raise MalformedError("no fence")
        return Evict(space, _key(key), int(argument))

    return parse


def _identify(_key: bytes, nonce: bytes) -> Request:
    if not _is_ticket(nonce):
        raise MalformedError(f"a nonce is 1 to {MAX_TICKET} letters and digits")
    return Identify(nonce)


def _ticket(text: bytes) -> bytes:
    if not _is_ticket(text):
        raise MalformedError(f"a ticket is 1 to {MAX_TICKET} letters and digits")
    return text


def _resume(_key: bytes, ticket: bytes) -> Request:
    return Resume(_ticket(ticket))


def _in_group(name: bytes, argument: bytes) -> Request:
    limit = 0 if argument == ANY else number(fields(argument, 1, 1)[0], 1, MAX_LIMIT)
    return InGroup(_key(name), limit)


def _reserve(_key: bytes, argument: bytes) -> Request:
    away, hold = fields(argument, 2, 2)
    return Reserve(number(away, 0), number(hold, 0))


def _turn(_key: bytes, argument: bytes) -> Request:
    return Turn(number(fields(argument, 1, 1)[0], 0))


def _pass(space: Space) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, ticket: bytes) -> Request:
        return Pass(space, _key(key), _ticket(ticket))

    return parse


def _draw_age(key: bytes, _argument: bytes) -> Request:
    return DrawAge(_key(key))


def _listen(key: bytes, argument: bytes) -> Request:
    return Listen(_key(key), arguments.release(argument))


def _shards(_key: bytes, argument: bytes) -> Request:
    # Anything may stand here, and what is no version is that of no map.
    version, *others = argument.split() or [ANY]
    return Shards(b"" if version == ANY else version, others == [_PACKED])


_PARSERS: dict[bytes, Callable[[bytes, bytes], Request]] = {
    b"l": _acquire(Space.LOCK, arguments.acquire_lock),
    b"r": _release(Space.LOCK),
    b"n": _renew(Space.LOCK),
    b"e": _enqueue(Space.LOCK, arguments.enqueue_lock),
    b"w": _wait(Space.LOCK),
    b"sl": _acquire(Space.SEMAPHORE, arguments.acquire_semaphore),
    b"sr": _release(Space.SEMAPHORE),
    b"sn": _renew(Space.SEMAPHORE),
    b"se": _enqueue(Space.SEMAPHORE, arguments.enqueue_semaphore),
    b"sw": _wait(Space.SEMAPHORE),
    b"stats": lambda _key, _argument: Stats(),
    b"auth": lambda _key, argument: Auth(argument),
    b"ping": lambda _key, _argument: Ping(),
    b"barrier": lambda _key, _argument: Barrier(),
    b"stable-ref": _stable_ref,
    b"label": _label,
    b"owner": arguments.owner,
    b"i": _inspect(Space.LOCK),
    b"si": _inspect(Space.SEMAPHORE),
    b"find": _find,
    b"detach": _renew(Space.LOCK, Detach),
    b"sdetach": _renew(Space.SEMAPHORE, Detach),
    b"confirm": _renew(Space.LOCK, Confirm),
    b"sconfirm": _renew(Space.SEMAPHORE, Confirm),
    b"begun": _renew(Space.LOCK, Begun),
    b"sbegun": _renew(Space.SEMAPHORE, Begun),
    b"unbegun": _release(Space.LOCK, Unbegun),
    b"sunbegun": _release(Space.SEMAPHORE, Unbegun),
    b"evict": _evict(Space.LOCK),
    b"sevict": _evict(Space.SEMAPHORE),
    b"shards": _shards,
    b"identify": _identify,
    b"resume": _resume,
    b"group": _in_group,
    b"keep": _reserve,
    b"turn": _turn,
    b"pass": _pass(Space.LOCK),
    b"spass": _pass(Space.SEMAPHORE),
    b"age": _draw_age,
    b"listen": _listen,
}


def parse_request(command: bytes, key: bytes, argument: bytes) -> Request:
    """Return what three lines say, each within its limit."""
    parse = _PARSERS.get(command)
    if parse is None:
        return Malformed("unknown command")
    try:
        return parse(key, argument)
    except MalformedError as exc:
        return Malformed(str(exc))


def encode_request(request: Request) -> bytes:
    """Return the three lines of `request`.

    The values are trusted to be sendable: check a key with `key_problem` first.
    """
    # Those of every lock first: it looks through the cases in order.
    match request:
        case Acquire(Space.LOCK, key, _, timeout, lease, rate):
            return b"l\n%b\n%b%b\n" % (key, _numbers(timeout, lease), _tail_of(rate))
        case Acquire(_, key, limit, timeout, lease, rate):
            return b"sl\n%b\n%b%b\n" % (key, _numbers(timeout, limit, lease), _tail_of(rate))
        case Release(space, key, token):
            return encode_release(space, key, token)
        case Enqueue(space, key, limit, lease, None):
            return encode_enqueue(space, key, limit, lease)
        case Enqueue(space, key, limit, lease, rate):
            plain = encode_enqueue(space, key, limit, lease)
            return b"%b%b\n" % (plain.removesuffix(b"\n"), _tail_of(rate))
        case Label(text):
            return b"label\n_\n%b\n" % text
        case Owner(name, attempt, instance, label, age):
            return encode_owner(name, attempt, instance, label, age)
        case Renew(space, key, token, lease):
            return _renewal(b"n", space, key, token, lease)
        case Begun(space, key, token, lease):
            return _renewal(b"begun", space, key, token, lease)
        case Unbegun(space, key, token):
            return b"%bunbegun\n%b\n%b\n" % (_PREFIXES[space], key, token)
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
        case Find(text, waiters, notes):
            flags = b",".join([b"waiters"] * waiters + [b"all"] * notes)
            return b"find\n%b\n%b\n" % (flags or ANY, text)
        case Evict(space, key, fence):
            return b"%bevict\n%b\n%d\n" % (_PREFIXES[space], key, fence)
        case Shards(version, packed):
            tail = b" " + _PACKED if packed else b""
            return b"shards\n_\n%b%b\n" % (version or ANY, tail)
        case Identify(nonce):
            return b"identify\n_\n%b\n" % nonce
        case Resume(ticket):
            return b"resume\n_\n%b\n" % ticket
        case InGroup(name, limit):
            return b"group\n%b\n%b\n" % (name, b"%d" % limit if limit else ANY)
        case Reserve(away, hold):
            return b"keep\n_\n%d %d\n" % (away, hold)
        case Turn(hold):
            return b"turn\n_\n%d\n" % hold
        case Pass(space, key, ticket):
            return b"%bpass\n%b\n%b\n" % (_PREFIXES[space], key, ticket)
        case DrawAge(key):
            return b"age\n%b\n_\n" % key
        case Listen(key, token):
            return b"listen\n%b\n%b\n" % (key, token)
        case Malformed():
            raise ValueError("a malformed request cannot be sent")


def encode_release(space: Space, key: bytes, token: bytes) -> bytes:
    """Return the three lines of a `Release`."""
    return b"%br\n%b\n%b\n" % (_PREFIXES[space], key, token)


def encode_enqueue(space: Space, key: bytes, limit: int, lease: int | None) -> bytes:
    """Return the three lines of an `Enqueue`."""
    if space is Space.LOCK:
        return b"e\n%b\n%b\n" % (key, b"" if lease is None else b"%d" % lease)
    return b"se\n%b\n%b\n" % (key, _numbers(limit, lease))


def encode_owner(
    name: bytes, attempt: int, instance: bytes, label: bytes | None, age: int = 0
) -> bytes:
    """Return the three lines of an `Owner`."""
    said = ANY if label is None else label
    if not name:
        return b"owner\n%b\n%b\n" % (said, ANY)
    if not instance:
        return b"owner\n%b\n%b %d\n" % (said, name, attempt)
    if age:
        return b"owner\n%b\n%b %d %b %d\n" % (said, name, attempt, instance, age)
    return b"owner\n%b\n%b %d %b\n" % (said, name, attempt, instance)


_PREFIXES = {Space.LOCK: b"", Space.SEMAPHORE: b"s"}


def _renewal(command: bytes, space: Space, key: bytes, token: bytes, lease: int | None) -> bytes:
    tail = b" %d" % lease if lease is not None else b""
    return b"%b%b\n%b\n%b%b\n" % (_PREFIXES[space], command, key, token, tail)


def _tail_of(rate: Rate | None) -> bytes:
    return b"" if rate is None else b" %d/%d" % rate


def _numbers(*numbers: int | None) -> bytes:
    return b" ".join([b"%d" % number for number in numbers if number is not None])
