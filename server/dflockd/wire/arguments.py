"""The arguments of requests: their fields, and the bounds of what stands in them.

Digits are ASCII and numbers are bounded: ``int()`` alone would take ``1_0``, other alphabets' digits
and numbers without end.
"""

from __future__ import annotations

from typing import Final, final

from dflockd.wire.messages import (
    MAX_AGE,
    MAX_ATTEMPT,
    MAX_LIMIT,
    MAX_OWNER,
    MAX_RATE,
    MAX_SECONDS,
    Owner,
    Rate,
)

ANY: Final = b"_"
"""Stands for nothing."""


class MalformedError(Exception):
    """What stands in a request cannot be meant."""


@final
class Asked:
    """What is asked of a key, in numbers: the argument of `Acquire`, `Enqueue` or `Wait`, read.

    What a request of its kind does not say is left as it is here.
    """

    __slots__ = ("lease", "limit", "rate", "timeout")

    def __init__(
        self,
        timeout: int = 0,
        limit: int = 1,
        lease: int | None = None,
        rate: Rate | None = None,
    ) -> None:
        self.timeout = timeout
        """Seconds."""
        self.limit = limit
        """Holders that there may be."""
        self.lease = lease
        """Seconds; ``None`` is the server's default."""
        self.rate = rate
        """Asked of few keys: there is only a message for that."""


def fields(argument: bytes, least: int, most: int) -> list[bytes]:
    """Return the fields of an argument, which has so many.

    Raises:
        MalformedError: it has not.
    """
    found = argument.split()
    if not least <= len(found) <= most:
        raise MalformedError("wrong number of fields")
    return found


def number(text: bytes, lowest: int, highest: int = MAX_SECONDS) -> int:
    """Return a number within bounds.

    Raises:
        MalformedError: it is none.
    """
    if text.isdigit() and len(text) <= 10 and lowest <= (found := int(text)) <= highest:
        return found
    raise MalformedError("number missing, malformed or out of range")


# One for each kind of argument. They raise `MalformedError`.


def acquire_lock(argument: bytes) -> Asked:
    """Read ``<timeout> [<lease>] [<rate>]``."""
    found, rate = _rated(argument, 1, 2)
    return Asked(number(found[0], 0), 1, _lease(found, 1), rate)


def acquire_semaphore(argument: bytes) -> Asked:
    """Read ``<timeout> <limit> [<lease>] [<rate>]``."""
    found, rate = _rated(argument, 2, 3)
    return Asked(number(found[0], 0), number(found[1], 1, MAX_LIMIT), _lease(found, 2), rate)


def enqueue_lock(argument: bytes) -> Asked:
    """Read ``[<lease>] [<rate>]``."""
    found, rate = _rated(argument, 0, 1)
    return Asked(lease=_lease(found, 0), rate=rate)


def enqueue_semaphore(argument: bytes) -> Asked:
    """Read ``<limit> [<lease>] [<rate>]``."""
    found, rate = _rated(argument, 1, 2)
    return Asked(0, number(found[0], 1, MAX_LIMIT), _lease(found, 1), rate)


def wait(argument: bytes) -> Asked:
    """Read ``<timeout>``."""
    return Asked(number(fields(argument, 1, 1)[0], 0))


def release(argument: bytes) -> bytes:
    """Read ``<token>``."""
    found = argument.split()
    return found[0] if len(found) == 1 else fields(argument, 1, 1)[0]


def renew(argument: bytes) -> tuple[bytes, int | None]:
    """Read ``<token> [<lease>]``."""
    found = fields(argument, 1, 2)
    return found[0], _lease(found, 1)


def label(text: bytes) -> bytes:
    """Read a label.

    Raises:
        MalformedError: it is not printable UTF-8.
    """
    try:
        is_printable = text.decode().isprintable()
    except UnicodeDecodeError:
        is_printable = False
    if not is_printable:
        raise MalformedError("a label is printable UTF-8")
    return text


def owner(text: bytes, argument: bytes) -> Owner:
    """Read ``<id> <attempt> [<instance> [<age>]]`` or ``_``, with a label or ``_`` in the line before.

    Raises:
        MalformedError: they are something else.
    """
    shown = None if text == ANY else label(text)
    if argument == ANY:
        return Owner(b"", 0, b"", shown)
    found = fields(argument, 2, 4)
    attempt = number(found[1], 0, MAX_ATTEMPT)
    instance = _name(found[2]) if len(found) > 2 else b""
    age = _age(found[3]) if len(found) == 4 else 0
    # Each task is another one: `Owner(...)` itself takes twice as much.
    return Owner._make((_name(found[0]), attempt, instance, shown, age))


def _age(text: bytes) -> int:
    if text.isdigit() and len(text) <= 20 and 1 <= (age := int(text)) <= MAX_AGE:
        return age
    raise MalformedError("an age is a number that the server has given out")


def _name(field: bytes) -> bytes:
    # White space is in no field. Most are letters and digits alone, which is soon seen.
    if len(field) <= MAX_OWNER and (
        field.isalnum() or (field.isascii() and field.decode().isprintable())
    ):
        return field
    raise MalformedError(f"an owner is 1 to {MAX_OWNER} printable ASCII characters")


def _rated(argument: bytes, least: int, most: int) -> tuple[list[bytes], Rate | None]:
    """Return the fields of an argument, and the rate that may stand behind them."""
    if b"/" not in argument:
        return fields(argument, least, most), None
    *found, last = fields(argument, least + 1, most + 1)
    runs, _, window = last.partition(b"/")
    return found, Rate(number(runs, 1, MAX_RATE), number(window, 1))


def _lease(found: list[bytes], index: int) -> int | None:
    return number(found[index], 1) if len(found) > index else None
