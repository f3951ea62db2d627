"""The arguments of requests: their fields, and the bounds of what stands in them.

Those of published requests are told by their position. Those of our own clients have names, so that one
request says all that it is about: ``timeout=10 lease=30 owner=3f2a attempt=0 label=sync [3f2a]``.

Digits are ASCII and numbers are bounded: ``int()`` alone would take ``1_0``, other alphabets' digits
and numbers without end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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
    """What is asked of a key: the argument of `Acquire`, `Enqueue`, `Wait` or `Renew`, read.

    What a request of its kind does not say is left as it is here. The names are those of the messages.
    """

    __slots__ = (
        "age",
        "group",
        "how",
        "label",
        "lease",
        "limit",
        "owner",
        "rate",
        "reserve",
        "ticket",
        "timeout",
        "token",
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
        self.token = b""
        """Of a `Renew`."""
        self.how = How.PLAIN


def number(text: bytes, lowest: int, highest: int = MAX_SECONDS, digits: int = 10) -> int:
    """Return a number within bounds, of so many digits at most.

    Raises:
        MalformedError: it is none.
    """
    if text.isdigit() and len(text) <= digits and lowest <= (found := int(text)) <= highest:
        return found
    raise MalformedError("number missing, malformed or out of range")


# Published arguments. All readers raise `MalformedError`.


def fields(argument: bytes, least: int, most: int) -> list[bytes]:
    """Return the fields of an argument, which has so many.

    Raises:
        MalformedError: it has not.
    """
    found = argument.split()
    if not least <= len(found) <= most:
        raise MalformedError("wrong number of fields")
    return found


def in_order(least: int, *names: str) -> Callable[[bytes], Asked]:
    """Return what reads numbers of these names, of which the first so many must be there."""

    def read(argument: bytes) -> Asked:
        asked = Asked()
        for name, text in zip(names, fields(argument, least, len(names)), strict=False):
            highest = MAX_LIMIT if name == "limit" else MAX_SECONDS
            setattr(asked, name, number(text, 0 if name == "timeout" else 1, highest))
        return asked

    return read


def token(argument: bytes) -> bytes:
    """Read ``<token>``."""
    # Letters and digits alone are one field.
    return argument if argument.isalnum() else fields(argument, 1, 1)[0]


def token_and_lease(argument: bytes) -> tuple[bytes, int | None]:
    """Read ``<token> [<lease>]``."""
    found = fields(argument, 1, 2)
    return found[0], number(found[1], 1) if len(found) > 1 else None


# Named fields.


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


def _by_name(*names: bytes, needed: bytes | None = None) -> Callable[[bytes], Asked]:
    """Return what reads fields of these names, of which one may be `needed`."""
    known = frozenset(names)

    def read(argument: bytes) -> Asked:
        found = _named(argument, known)
        if needed is not None and needed not in found:
            raise MalformedError(f"no {needed.decode()}")
        asked = Asked()
        _fill(asked, found, has_owner=b"owner" in known, has_limit=b"limit" in known)
        return asked

    return read


def _of_runs(read: Callable[[bytes], Asked]) -> Callable[[bytes], Asked]:
    """Return what reads the same, sooner if clients ask for one run after the other.

    All runs of a task say the same of the slot, and then whose they are: `` owner=<id> attempt=<n>
    label=<text>``. What comes before is remembered as it was read.
    """
    alike: dict[bytes, Asked] = {}

    def read_run(argument: bytes) -> Asked:
        slot, _, run = argument.partition(b" owner=")
        said = run.split(b" ", 2)
        if len(said) != 3 or said[1][:8] != b"attempt=" or said[2][:6] != b"label=":
            return read(argument)
        as_read = alike.get(slot)
        if as_read is None:
            asked = read(argument)
            if _ONE_RUN.search(slot) is None:
                if len(alike) >= MOST_ALIKE:
                    alike.clear()
                alike[slot] = asked
            return asked
        attempt, shown = number(said[1][8:], 0, MAX_ATTEMPT), label(said[2][6:])
        if not shown:
            raise MalformedError("an empty label")
        asked = Asked()
        asked.timeout, asked.limit, asked.lease = as_read.timeout, as_read.limit, as_read.lease
        asked.rate, asked.group, asked.turn = as_read.rate, as_read.group, as_read.turn
        asked.owner, asked.label = Owner._make((checked_name(said[0]), attempt, 0)), shown
        return asked

    return read_run


MOST_ALIKE: Final = 256
"""So many beginnings of requests are remembered for each command."""

_ONE_RUN: Final = re.compile(rb"(?:^| )(?:owner|attempt|age|label|ticket|away|hold)=")
"""What is said of one run alone, or makes the rest a part of a label."""


def _share(found: dict[bytes, bytes]) -> FairGroup | None:
    """Read of which group somebody is, and how many slots it takes."""
    group, most, weight = found.get(b"group"), found.get(b"group-limit"), found.get(b"weight")
    if group is None and most is not None:
        raise MalformedError("the limit of no group")
    if group is not None and key_problem(group):
        raise MalformedError(f"group {key_problem(group)}")
    slots = 1 if weight is None else number(weight, 1, MAX_LIMIT)
    if group is None:
        return None if slots == 1 else FairGroup(b"", 0, slots)
    return FairGroup(group, 0 if most is None else number(most, 1, MAX_LIMIT), slots)


def _fill(asked: Asked, found: dict[bytes, bytes], *, has_owner: bool, has_limit: bool) -> None:
    """Read all fields that there are; a `Wait` has no owner, and says only the age of its own."""
    get = found.get
    if (timeout := get(b"timeout")) is not None:
        asked.timeout = number(timeout, 0)
    if (limit := get(b"limit")) is not None:
        asked.limit = number(limit, 1, MAX_LIMIT)
    if (lease := get(b"lease")) is not None:
        asked.lease = number(lease, 1)
    if (rate := get(b"rate")) is not None:
        runs, _, window = rate.partition(b"/")
        asked.rate = Rate(number(runs, 1, MAX_RATE), number(window, 1))
    if (turn := get(b"turn")) is not None:
        asked.turn = number(turn, 0)
    if b"away" in found or b"hold" in found:
        asked.reserve = Reserve(number(get(b"away", b""), 0), number(get(b"hold", b""), 0))
    age = number(found[b"age"], 1, MAX_AGE, 20) if b"age" in found else 0
    if (name := get(b"owner")) is not None:
        attempt = number(get(b"attempt", b"0"), 0, MAX_ATTEMPT)
        # Each task is another one: `Owner(...)` itself takes twice as much.
        asked.owner = Owner._make((checked_name(name), attempt, age))
    elif has_owner and (age or b"attempt" in found):
        raise MalformedError("the attempt of nobody, or the age")
    else:
        asked.age = age
    if (shown := get(b"label")) is not None:
        asked.label = label(shown)
    if not _SHARE.isdisjoint(found):
        if b"weight" in found and has_limit and asked.limit == 1:
            raise MalformedError("a weight without a limit")
        asked.group = _share(found)
    if (ticket := get(b"ticket")) is not None:
        asked.ticket = checked_ticket(ticket)
    if (token := get(b"token")) is not None:
        asked.token = token
        try:
            asked.how = How(get(b"how", b""))
        except ValueError:
            raise MalformedError("an unknown way to renew") from None


_SHARE: Final = frozenset((b"group", b"group-limit", b"weight"))

_WHO: Final = (b"lease", b"owner", b"attempt", b"age", b"label", *sorted(_SHARE))
_SLOT: Final = (*_WHO, b"limit", b"rate", b"ticket")
_RESERVE: Final = (b"away", b"hold")

acquire: Final = _of_runs(_by_name(*_SLOT, *_RESERVE, b"timeout", needed=b"timeout"))
enqueue: Final = _of_runs(_by_name(*_SLOT, b"turn"))
wait: Final = _by_name(*_RESERVE, b"age", b"timeout", needed=b"timeout")
renew: Final = _by_name(*_WHO, b"how", b"token", needed=b"token")


def pause(argument: bytes) -> tuple[int | None, bytes, bytes]:
    """Read for how many milliseconds to pause a key, by whom and why.

    Raises:
        MalformedError: it cannot be meant.
    """
    found = _named(argument, _PAUSE, b"reason")
    span = number(found[b"for"], 1) if b"for" in found else None
    return span, label(found.get(b"by", b"")), label(found.get(b"reason", b""))


_PAUSE: Final = frozenset({b"for", b"by", b"reason"})


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
    """Read a name: of an owner, an instance, a version, a ref.

    Raises:
        MalformedError: it is too long, or not printable ASCII without space.
    """
    # Most are letters and digits alone, which is soon seen.
    if 0 < len(field) <= MAX_OWNER and (
        field.isalnum() or (field.isascii() and field.decode().isprintable() and b" " not in field)
    ):
        return field
    raise MalformedError(f"a name is 1 to {MAX_OWNER} printable ASCII characters")


def checked_ticket(text: bytes) -> bytes:
    """Read a ticket.

    Raises:
        MalformedError: it is not made of letters and digits alone, or too long.
    """
    if not text.isalnum() or len(text) > MAX_TICKET:
        raise MalformedError(f"a ticket is 1 to {MAX_TICKET} letters and digits")
    return text
