"""Requests: three lines to a message, and a message to three lines."""

from __future__ import annotations

import re
from collections.abc import Callable

from dflockd.wire import arguments
from dflockd.wire.arguments import Asked, MalformedError
from dflockd.wire.keys import key_problem
from dflockd.wire.messages import (
    MAX_REF,
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
    Owner,
    Pass,
    Ping,
    Rate,
    Release,
    Renew,
    Request,
    Shards,
    Space,
    StableRef,
    Stats,
    Unbegun,
    Wait,
)
from dflockd.wire.tokens import MAX_FENCE

ANY = b"_"
"""Stands for nothing."""

_printable_ascii = re.compile(rb"[!-~]{1,%d}" % MAX_REF).fullmatch
_PACKED = b"zlib"


# One parser for each command.


def _key(key: bytes) -> bytes:
    problem = key_problem(key)
    if problem:
        raise MalformedError(f"key {problem}")
    return key


def _acquire(space: Space, read: Callable[[bytes], Asked]) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        a = read(argument)
        said = a.rate, a.owner, a.label, a.group, a.ticket, a.reserve
        return Acquire(space, _key(key), a.limit, a.timeout, a.lease, *said)

    return parse


def _enqueue(space: Space, read: Callable[[bytes], Asked]) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        a = read(argument)
        said = a.rate, a.owner, a.label, a.group, a.ticket, a.turn
        return Enqueue(space, _key(key), a.limit, a.lease, *said)

    return parse


def _wait(space: Space, read: Callable[[bytes], Asked]) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        asked = read(argument)
        return Wait(space, _key(key), asked.timeout, asked.reserve, asked.age)

    return parse


def _release(space: Space) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        return Release(space, _key(key), arguments.release(argument))

    return parse


def _unbegun(key: bytes, argument: bytes) -> Request:
    return Unbegun(_key(key), arguments.release(argument))


def _renew_published(space: Space) -> Callable[[bytes, bytes], Request]:
    def parse(key: bytes, argument: bytes) -> Request:
        return Renew(space, _key(key), *arguments.renew_published(argument))

    return parse


def _renew(key: bytes, argument: bytes) -> Request:
    r = arguments.renew(argument)
    return Renew(Space.LOCK, _key(key), r.token, r.lease, r.how, r.owner, r.label, r.group)


def _hello(instance: bytes, argument: bytes) -> Request:
    # Fields that are unknown are for later servers: every one must be able to answer.
    said, has_secret, secret = (b" " + argument).partition(b" secret=")
    version = b""
    for field in said.split(b" "):
        name, _, value = field.partition(b"=")
        if name == b"version":
            version = arguments.checked_name(value)
    return Hello(arguments.checked_name(instance), version, secret if has_secret else None)


def _stable_ref(ref: bytes, _argument: bytes) -> Request:
    if not _printable_ascii(ref):
        raise MalformedError(f"a ref is 1 to {MAX_REF} printable ASCII characters")
    return StableRef(ref)


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
    return Identify(arguments.checked_ticket(nonce))


def _pass(key: bytes, ticket: bytes) -> Request:
    return Pass(_key(key), arguments.checked_ticket(ticket))


def _draw_age(key: bytes, _argument: bytes) -> Request:
    return DrawAge(_key(key))


def _listen(key: bytes, argument: bytes) -> Request:
    return Listen(_key(key), arguments.release(argument))


def _shards(_key: bytes, argument: bytes) -> Request:
    # Anything may stand here, and what is no version is that of no map.
    version, *others = argument.split() or [ANY]
    return Shards(b"" if version == ANY else version, others == [_PACKED])


_PARSERS: dict[bytes, Callable[[bytes, bytes], Request]] = {
    # Published.
    b"l": _acquire(Space.LOCK, arguments.acquire_lock),
    b"r": _release(Space.LOCK),
    b"n": _renew_published(Space.LOCK),
    b"e": _enqueue(Space.LOCK, arguments.enqueue_lock),
    b"w": _wait(Space.LOCK, arguments.wait_published),
    b"sl": _acquire(Space.SEMAPHORE, arguments.acquire_semaphore),
    b"sr": _release(Space.SEMAPHORE),
    b"sn": _renew_published(Space.SEMAPHORE),
    b"se": _enqueue(Space.SEMAPHORE, arguments.enqueue_semaphore),
    b"sw": _wait(Space.SEMAPHORE, arguments.wait_published),
    b"stats": lambda _key, _argument: Stats(),
    b"auth": lambda _key, argument: Auth(argument),
    b"ping": lambda _key, _argument: Ping(),
    b"barrier": lambda _key, _argument: Barrier(),
    b"stable-ref": _stable_ref,
    # Of our own clients.
    b"hello": _hello,
    b"acquire": _acquire(Space.LOCK, arguments.acquire),
    b"enqueue": _enqueue(Space.LOCK, arguments.enqueue),
    b"wait": _wait(Space.LOCK, arguments.wait),
    b"renew": _renew,
    b"unbegun": _unbegun,
    b"pass": _pass,
    b"age": _draw_age,
    b"listen": _listen,
    b"shards": _shards,
    b"identify": _identify,
    # Of operators.
    b"i": _inspect(Space.LOCK),
    b"si": _inspect(Space.SEMAPHORE),
    b"find": _find,
    b"evict": _evict(Space.LOCK),
    b"sevict": _evict(Space.SEMAPHORE),
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
    """Return the three lines of `request`: published ones, if they can say all of it.

    The values are trusted to be sendable: check a key with `key_problem` first.
    """
    # That of every lock before all: among the cases it would take twice as long.
    if isinstance(request, Acquire):
        return _encode_acquire(request)
    # Then what comes often: it looks through the cases in order.
    match request:
        case Release(space, key, token):
            return encode_release(space, key, token)
        case Enqueue(space, key, limit, lease, None, None, b"", None, b"", None) if (
            limit == 1 or space is Space.SEMAPHORE
        ):
            if space is Space.SEMAPHORE:
                return b"se\n%b\n%b\n" % (key, _numbers(limit, lease))
            return b"e\n%b\n%b\n" % (key, _numbers(lease))
        case Enqueue(_, key, limit, lease, rate, owner, label, group, ticket, turn):
            said = b"" if turn is None else b" turn=%d" % turn
            said += _slot(limit, lease, rate, owner, label, group, ticket)
            return b"enqueue\n%b\n%b\n" % (key, said[1:])
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
        case Unbegun(key, token):
            return b"unbegun\n%b\n%b\n" % (key, token)
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
        case Pass(key, ticket):
            return b"pass\n%b\n%b\n" % (key, ticket)
        case DrawAge(key):
            return b"age\n%b\n_\n" % key
        case Listen(key, token):
            return b"listen\n%b\n%b\n" % (key, token)
        case Malformed():
            raise ValueError("a malformed request cannot be sent")


_NOTHING_MORE = Acquire(Space.LOCK, b"", 1, 0, None)[5:]


def _encode_acquire(request: Acquire) -> bytes:
    space, key, limit, timeout, lease, rate, owner, label, group, ticket, reserve = request
    if request[5:] == _NOTHING_MORE:
        if space is Space.SEMAPHORE:
            return b"sl\n%b\n%b\n" % (key, _numbers(timeout, limit, lease))
        if limit == 1:
            return b"l\n%b\n%b\n" % (key, _numbers(timeout, lease))
    said = b"timeout=%d" % timeout
    if reserve is not None:
        said += b" away=%d hold=%d" % reserve
    said += _slot(limit, lease, rate, owner, label, group, ticket)
    return b"acquire\n%b\n%b\n" % (key, said)


def encode_release(space: Space, key: bytes, token: bytes) -> bytes:
    """Return the three lines of a `Release`."""
    return b"%br\n%b\n%b\n" % (_PREFIXES[space], key, token)


_PREFIXES = {Space.LOCK: b"", Space.SEMAPHORE: b"s"}


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
    if owner is not None:
        name, attempt, age = owner
        said += b" owner=%b attempt=%d" % (name, attempt)
        if age:
            said += b" age=%d" % age
    if group is not None:
        said += b" group=%b" % group.name
        if group.limit:
            said += b" group-limit=%d" % group.limit
    if ticket:
        said += b" ticket=%b" % ticket
    return said + b" label=" + label if label else said


def _numbers(*numbers: int | None) -> bytes:
    return b" ".join([b"%d" % number for number in numbers if number is not None])
