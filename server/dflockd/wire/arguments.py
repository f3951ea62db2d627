"""The arguments of requests: their fields, and the bounds of what stands in them.

Those of published requests are told by their position. Those of our own clients have names, so that one
request says all that it is about: ``timeout=10 lease=30 owner=3f2a attempt=0 label=sync [3f2a]``.

Digits are ASCII and numbers are bounded: ``int()`` alone would take ``1_0``, other alphabets' digits
and numbers without end.
"""

from __future__ import annotations

from typing import Final, final

from dflockd.wire.keys import key_problem
from dflockd.wire.messages import (
    MAX_AGE,
    MAX_ATTEMPT,
    MAX_LIMIT,
    MAX_LINE,
    MAX_OWNER,
    MAX_RATE,
    MAX_SECONDS,
    MAX_TICKET,
    FairGroup,
    How,
    Owner,
    Rate,
    Reserve,
)


class MalformedError(Exception):
    """What stands in a request cannot be meant."""


@final
class Asked:
    """What is asked of a key: the argument of `Acquire`, `Enqueue` or `Wait`, read.

    What a request of its kind does not say is left as it is here. The names are those of the messages.
    """

    __slots__ = (
        "age",
        "group",
        "label",
        "lease",
        "limit",
        "owner",
        "rate",
        "reserve",
        "ticket",
        "timeout",
        "turn",
    )

    def __init__(
        self,
        timeout: int = 0,
        limit: int = 1,
        lease: int | None = None,
        rate: Rate | None = None,
        owner: Owner | None = None,
        label: bytes = b"",
        group: FairGroup | None = None,
        ticket: bytes = b"",
        turn: int | None = None,
        reserve: Reserve | None = None,
        age: int = 0,
    ) -> None:
        self.timeout = timeout
        """Seconds."""
        self.limit = limit
        self.lease = lease
        """Seconds; ``None`` is the server's default."""
        self.rate = rate
        self.owner = owner
        self.label = label
        self.group = group
        self.ticket = ticket
        self.turn = turn
        self.reserve = reserve
        self.age = age
        """Of a `Wait`; that of the others is the owner's."""


def number(text: bytes, lowest: int, highest: int = MAX_SECONDS, digits: int = 10) -> int:
    """Return a number within bounds, of so many digits at most.

    Raises:
        MalformedError: it is none.
    """
    if text.isdigit() and len(text) <= digits and lowest <= (found := int(text)) <= highest:
        return found
    raise MalformedError("number missing, malformed or out of range")


# Published arguments, one reader for each kind. All readers raise `MalformedError`.


def fields(argument: bytes, least: int, most: int) -> list[bytes]:
    """Return the fields of an argument, which has so many.

    Raises:
        MalformedError: it has not.
    """
    found = argument.split()
    if not least <= len(found) <= most:
        raise MalformedError("wrong number of fields")
    return found


def acquire_lock(argument: bytes) -> Asked:
    """Read ``<timeout> [<lease>]``."""
    found = fields(argument, 1, 2)
    return Asked(number(found[0], 0), 1, _lease(found, 1))


def acquire_semaphore(argument: bytes) -> Asked:
    """Read ``<timeout> <limit> [<lease>]``."""
    found = fields(argument, 2, 3)
    return Asked(number(found[0], 0), number(found[1], 1, MAX_LIMIT), _lease(found, 2))


def enqueue_lock(argument: bytes) -> Asked:
    """Read ``[<lease>]``."""
    return Asked(lease=_lease(fields(argument, 0, 1), 0))


def enqueue_semaphore(argument: bytes) -> Asked:
    """Read ``<limit> [<lease>]``."""
    found = fields(argument, 1, 2)
    return Asked(0, number(found[0], 1, MAX_LIMIT), _lease(found, 1))


def wait_published(argument: bytes) -> Asked:
    """Read ``<timeout>``."""
    return Asked(number(fields(argument, 1, 1)[0], 0))


def release(argument: bytes) -> bytes:
    """Read ``<token>``."""
    found = argument.split()
    return found[0] if len(found) == 1 else fields(argument, 1, 1)[0]


def renew_published(argument: bytes) -> tuple[bytes, int | None]:
    """Read ``<token> [<lease>]``."""
    found = fields(argument, 1, 2)
    return found[0], _lease(found, 1)


def _lease(found: list[bytes], index: int) -> int | None:
    return number(found[index], 1) if len(found) > index else None


# Named fields.

_SLOT: Final = (
    *(b"limit", b"lease", b"rate", b"owner", b"attempt", b"age", b"label"),
    *(b"group", b"group-limit", b"ticket"),
)
_ACQUIRE: Final = frozenset((*_SLOT, b"timeout", b"away", b"hold"))
_ENQUEUE: Final = frozenset((*_SLOT, b"turn"))
_WAIT: Final = frozenset((b"timeout", b"away", b"hold", b"age"))
_RENEW: Final = frozenset(
    (b"token", b"lease", b"how", b"owner", b"attempt", b"age", b"label", b"group", b"group-limit")
)


def acquire(argument: bytes) -> Asked:
    """Read what ``acquire`` says."""
    found = _named(argument, _ACQUIRE)
    asked = _slot(found)
    asked.timeout = number(found.get(b"timeout", b""), 0)
    asked.reserve = _reserve(found)
    return asked


def enqueue(argument: bytes) -> Asked:
    """Read what ``enqueue`` says."""
    found = _named(argument, _ENQUEUE)
    asked = _slot(found)
    turn = found.get(b"turn")
    if turn is not None:
        asked.turn = number(turn, 0)
    return asked


def wait(argument: bytes) -> Asked:
    """Read what ``wait`` says."""
    found = _named(argument, _WAIT)
    return Asked(number(found.get(b"timeout", b""), 0), reserve=_reserve(found), age=_age(found))


@final
class Renewal:
    """The argument of a `Renew`, read; the names are those of the message."""

    __slots__ = ("group", "how", "label", "lease", "owner", "token")

    def __init__(self, found: dict[bytes, bytes]) -> None:
        self.token = found.get(b"token", b"")
        if not self.token:
            raise MalformedError("no token")
        lease = found.get(b"lease")
        self.lease = None if lease is None else number(lease, 1)
        try:
            self.how = How(found.get(b"how", b""))
        except ValueError:
            raise MalformedError("an unknown way to renew") from None
        self.owner = _owner(found)
        self.label = label(found.get(b"label", b""))
        self.group = _group(found)


def renew(argument: bytes) -> Renewal:
    """Read what ``renew`` says."""
    return Renewal(_named(argument, _RENEW))


def hello(argument: bytes) -> tuple[bytes, bytes | None]:
    """Read the version of a client, and the secret if it shows one.

    Other fields are for later servers: every server must be able to answer.
    """
    found = _named(argument, None, b"secret")
    return checked_name(found.get(b"version", b"")), found.get(b"secret")


def _named(
    argument: bytes, known: frozenset[bytes] | None, rest: bytes = b"label"
) -> dict[bytes, bytes]:
    """Return the fields of an argument by their names; those that may be there, unless all may.

    One space is between two fields. The one called `rest` goes on to the end: it has spaces.
    """
    found: dict[bytes, bytes] = {}
    said, is_there, last = (argument and b" " + argument).partition(b" %b=" % rest)
    for field in said.split(b" ")[1:]:
        name, _, value = field.partition(b"=")
        if not value or name in found or (known is not None and name not in known):
            raise MalformedError("a field is empty, unknown or there twice")
        found[name] = value
    if is_there:
        if known is not None and (not last or rest not in known):
            raise MalformedError(f"an empty {rest.decode()}, or one that does not belong here")
        found[rest] = last
    return found


def _slot(found: dict[bytes, bytes]) -> Asked:
    """Read what both requests for a slot can say."""
    asked = Asked(0, number(found.get(b"limit", b"1"), 1, MAX_LIMIT))
    lease, rate, ticket = found.get(b"lease"), found.get(b"rate"), found.get(b"ticket")
    if lease is not None:
        asked.lease = number(lease, 1)
    if rate is not None:
        runs, _, window = rate.partition(b"/")
        asked.rate = Rate(number(runs, 1, MAX_RATE), number(window, 1))
    if ticket is not None:
        asked.ticket = checked_ticket(ticket)
    asked.owner = _owner(found)
    asked.group = _group(found)
    if b"label" in found:
        asked.label = label(found[b"label"])
    return asked


def _owner(found: dict[bytes, bytes]) -> Owner | None:
    name = found.get(b"owner")
    if name is None:
        if b"attempt" in found or b"age" in found:
            raise MalformedError("the attempt of nobody, or the age")
        return None
    attempt = number(found.get(b"attempt", b"0"), 0, MAX_ATTEMPT)
    # Each task is another one: `Owner(...)` itself takes twice as much.
    return Owner._make((checked_name(name), attempt, _age(found)))


def _age(found: dict[bytes, bytes]) -> int:
    age = found.get(b"age")
    return 0 if age is None else number(age, 1, MAX_AGE, 20)


def _group(found: dict[bytes, bytes]) -> FairGroup | None:
    name, limit = found.get(b"group"), found.get(b"group-limit")
    if name is None:
        if limit is not None:
            raise MalformedError("the limit of no group")
        return None
    if key_problem(name):
        raise MalformedError(f"group {key_problem(name)}")
    return FairGroup(name, 0 if limit is None else number(limit, 1, MAX_LIMIT))


def _reserve(found: dict[bytes, bytes]) -> Reserve | None:
    away, hold = found.get(b"away"), found.get(b"hold")
    if away is None and hold is None:
        return None
    return Reserve(number(away or b"", 0), number(hold or b"", 0))


# What stands in fields.


def label(text: bytes) -> bytes:
    """Read a label.

    Raises:
        MalformedError: it is not printable UTF-8, or too long.
    """
    try:
        is_printable = text.decode().isprintable()
    except UnicodeDecodeError:
        is_printable = False
    if not is_printable or len(text) > MAX_LINE:
        raise MalformedError(f"a label is up to {MAX_LINE} bytes of printable UTF-8")
    return text


def checked_name(field: bytes) -> bytes:
    """Read the name of an owner or an instance.

    Raises:
        MalformedError: it is too long, or not printable ASCII without space.
    """
    # Most are letters and digits alone, which is soon seen.
    if 0 < len(field) <= MAX_OWNER and (
        field.isalnum() or (field.isascii() and field.decode().isprintable() and b" " not in field)
    ):
        return field
    raise MalformedError(f"an owner is 1 to {MAX_OWNER} printable ASCII characters")


def checked_ticket(text: bytes) -> bytes:
    """Read a ticket.

    Raises:
        MalformedError: it is not made of letters and digits alone, or too long.
    """
    if not text.isalnum() or len(text) > MAX_TICKET:
        raise MalformedError(f"a ticket is 1 to {MAX_TICKET} letters and digits")
    return text
