"""Checks of what users pass: everything is refused early, with one line, before a byte is sent."""

from __future__ import annotations

import getpass
import inspect
import math
import os
import ssl
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from dflockd import errors
from dflockd.client.introduction import new
from dflockd.errors import shown
from dflockd.wire import (
    ALL,
    MAX_AGE,
    MAX_ATTEMPT,
    MAX_LIMIT,
    MAX_LINE,
    MAX_OWNER,
    MAX_SECONDS,
    MAX_SECRET,
    FairGroup,
    Owner,
    Pause,
    Reserve,
    key_problem,
)

OwnerLike: TypeAlias = "tuple[str, int] | tuple[str, int, int]"
"""The run that asks: its name, and the number of the attempt; and an age, where the newest wins."""


class Reservation(NamedTuple):
    """Keeps a position in the queue after a wait that ends without a grant.

    `enqueue` with its ticket takes the position up later, in this process or another. Whenever that
    is, it is ahead of all who came later. If its turn comes earlier, others go first, but around the
    expected time a slot is held for it. It is forgotten a minute after that time, and when a server
    without a cluster ends.
    """

    away_s: float
    """Seconds after which it is expected to be taken up; at most the server's longest lease."""
    hold_s: float
    """Seconds before and after that in which a slot may be idle for its sake; 0 holds nothing."""


def check_key(key: object) -> None:
    """Refuse a key that cannot be sent.

    Raises:
        InvalidKeyError: it cannot.
    """
    if _is_name(key, MAX_LINE):
        return  # nearly every one
    if not isinstance(key, str):
        raise errors.InvalidKeyError(f"key is {shown(key)}: give a string")
    try:
        problem = key_problem(key.encode())
    except UnicodeEncodeError:
        problem = "contains half of a surrogate pair"
    if problem:
        raise errors.InvalidKeyError(
            f"key {shown(key)} {problem}: use up to 256 bytes of UTF-8 without white space", key=key
        )


def check_timeout(seconds: object, key: str, name: str = "acquire_timeout_s") -> None:
    """Refuse a time to wait that is not a number of seconds, 0 or more.

    Raises:
        InvalidArgumentError: it is not.
    """
    if seconds is None:
        return
    # The comparison is false for a NaN as well.
    if not _is_number(seconds) or not 0 <= seconds <= MAX_SECONDS:
        raise _bad(name, seconds, key, "seconds, 0 or more, or None to wait forever")


def check_lease(seconds: object, key: str) -> None:
    """Refuse a lease that is not a whole number of seconds, 1 or more.

    Raises:
        InvalidArgumentError: it is not.
    """
    if seconds is None:
        return
    if not _is_whole(seconds, 1, MAX_SECONDS):
        wanted = "whole seconds, 1 or more, or None for the server's default"
        raise _bad("lease_ttl_s", seconds, key, wanted)


def check_renew_ratio(ratio: object, key: str) -> None:
    """Refuse what is no share of a lease.

    Raises:
        InvalidArgumentError: it is none.
    """
    if not _is_number(ratio) or not 0 < ratio < 1:
        raise _bad("renew_ratio", ratio, key, "a share between 0 and 1")


def check_strategy(strategy: object, key: str) -> None:
    """Refuse what cannot say where a key lives.

    Raises:
        InvalidArgumentError: it cannot.
    """
    if not callable(strategy):
        wanted = "a function (key, number of servers) -> index"
        raise _bad("sharding_strategy", strategy, key, wanted)


def check_fence(fence: object, key: str) -> None:
    """Refuse what can be no fence.

    Raises:
        InvalidArgumentError: it can be none.
    """
    if not _is_whole(fence, 0, 2**64 - 1):
        raise _bad("fence", fence, key, "the number of a grant")


def check_limit(limit: object, key: object) -> None:
    """Refuse a number of holders that no semaphore can have.

    Raises:
        InvalidArgumentError: it is none.
    """
    if not _is_whole(limit, 1, MAX_LIMIT):
        raise errors.InvalidArgumentError(
            f"limit is {shown(limit)} for semaphore {key!r}: give a whole number from 1 to {MAX_LIMIT}"
        )


def checked_weight(weight: object, limit: int, key: str) -> int:
    """Return how many of the slots of a key a run takes, as it is sent.

    Raises:
        InvalidArgumentError: it can take no so many.
    """
    wanted = f"a whole number from 1 to the limit ({limit}), or 'all'"
    if not (_is_whole(weight, 1, MAX_LIMIT) or (isinstance(weight, str) and weight == "all")):
        raise _bad("weight", weight, key, wanted)
    if limit == 1 and weight != 1:
        raise errors.InvalidArgumentError(
            f"weight is {shown(weight)} for {key!r}, of which the limit is 1: "
            "give a larger limit, or remove the weight",
            key=key,
        )
    if weight == "all":
        return ALL
    if not _is_whole(weight, 1, limit):
        raise _bad("weight", weight, key, wanted)
    assert isinstance(weight, int)
    return weight


def checked_group(group: object, limit: object, key: str) -> FairGroup | None:
    """Return a group as it is sent.

    Raises:
        InvalidArgumentError: it can be none, or has no such limit.
    """
    if group is None:
        if limit is not None:
            raise errors.InvalidArgumentError(
                f"group_limit is {shown(limit)} for lock {key!r}, which has no group: "
                "give a group too, or remove it",
                key=key,
            )
        return None
    try:
        problem = key_problem(group.encode()) if isinstance(group, str) else "is no text"
    except UnicodeEncodeError:
        problem = "contains half of a surrogate pair"
    if problem:
        raise errors.InvalidArgumentError(
            f"group {shown(group)} of lock {key!r} {problem}: "
            "use up to 256 bytes of UTF-8 without white space",
            key=key,
        )
    check_group_limit(limit, key)
    assert isinstance(group, str)
    return FairGroup(group.encode(), limit if isinstance(limit, int) else 0)


def check_group_limit(limit: object, key: str) -> None:
    """Refuse what is no number of holders of one group.

    Raises:
        InvalidArgumentError: it is none.
    """
    if limit is not None and not _is_whole(limit, 1, MAX_LIMIT):
        wanted = f"a whole number from 1 to {MAX_LIMIT}, or None for no limit"
        raise _bad("group_limit", limit, key, wanted)


def check_tls(context: object) -> None:
    """Refuse what is no TLS context.

    Raises:
        InvalidArgumentError: it is none.
    """
    if context is not None and not isinstance(context, ssl.SSLContext):
        raise errors.InvalidArgumentError(
            f"ssl_context is {shown(context)}: give an ssl.SSLContext, such as "
            "ssl.create_default_context(), or None for servers that speak no TLS"
        )


def check_callback(on_lost: object, key: str, *, may_be_async: bool) -> None:
    """Refuse what cannot be called when a lock is lost.

    Raises:
        InvalidArgumentError: it cannot, or nobody would await it.
    """
    if on_lost is None:
        return
    if not callable(on_lost):
        raise _bad("on_lost", on_lost, key, "a function of the lock")
    if may_be_async or _is_plain_function(on_lost):
        return
    called = getattr(on_lost, "__call__", on_lost)  # noqa: B004 - an object's own
    if inspect.iscoroutinefunction(on_lost) or inspect.iscoroutinefunction(called):
        raise errors.InvalidArgumentError(
            f"on_lost of lock {key!r} is a coroutine function, which nobody would await: "
            "give a plain function, or use dflockd.client",
            key=key,
        )


def _is_plain_function(function: Any) -> bool:
    """Whether it is a function, or a method, that surely is no coroutine function nor marked as one."""
    if type(function) is MethodType:
        function = function.__func__
    return (
        type(function) is FunctionType
        and not function.__code__.co_flags & inspect.CO_COROUTINE
        and not function.__dict__
    )


def check_token(token: object, key: str) -> bytes:
    """Return a token as it is sent.

    Raises:
        InvalidArgumentError: it is malformed; the message does not show it.
    """
    return check_name(token, key, "token", "detach() returned")


def check_name(name: object, key: str, what: str, source: str) -> bytes:
    """Return a token, or a ticket, as it is sent.

    Raises:
        InvalidArgumentError: it can be none; the text does not show it.
    """
    sent = name.encode("ascii", "replace") if isinstance(name, str) else b""
    if not sent.isalnum() or len(sent) > MAX_LINE:
        raise errors.InvalidArgumentError(
            f"lock {key!r}: the {what} is malformed: give the one that {source}", key=key
        )
    return sent


def reservation_request(reservation: object, key: str) -> Reserve:
    """Return a reservation as it is sent.

    Raises:
        InvalidArgumentError: it is none.
    """
    if not isinstance(reservation, Reservation):
        raise _bad("reservation", reservation, key, "a Reservation")
    for name, seconds in zip(reservation._fields, reservation, strict=True):
        if not _is_number(seconds) or not 0 <= seconds <= MAX_SECONDS:
            raise _bad(name, seconds, key, "seconds, 0 or more")
    away, hold = (min(math.ceil(seconds * 1000), MAX_SECONDS) for seconds in reservation)
    return Reserve(away, hold)


def checked_pause(key: str, for_s: object, reason: object, by: object) -> Pause:
    """Return a pause as it is sent; by default it is by the user of this process.

    Raises:
        InvalidArgumentError: it can be none.
    """
    span: int | None = None
    if for_s is not None:
        if not _is_number(for_s) or not 0 < for_s <= MAX_SECONDS / 1000:
            wanted = (
                f"seconds, above 0 and up to {MAX_SECONDS // 1000}, or None until it is resumed"
            )
            raise _bad("for_s", for_s, key, wanted)
        span = math.ceil(for_s * 1000)
    if by is None:
        by = _user()
    if not isinstance(by, str) or " " in by or not _is_line(by):
        raise _bad("by", by, key, f"a name of up to {MAX_LINE} bytes without white space")
    if not isinstance(reason, str) or not _is_line(reason):
        raise _bad("reason", reason, key, f"one line of up to {MAX_LINE} bytes")
    return Pause(key.encode(), span, by.encode(), reason.encode())


def _is_line(text: str) -> bool:
    """Whether a text can be sent as a label is."""
    return text.isprintable() and len(text.encode()) <= MAX_LINE


def _user() -> str:
    """Return who runs this process, and where."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        name = str(os.getuid())
    return f"{name}@{os.uname().nodename}"


def checked_secret(auth_token: object) -> bytes | None:
    """Return a shared secret as it is sent.

    Raises:
        InvalidArgumentError: it can be none; the text does not show it.
    """
    if auth_token is None:
        return None
    try:
        secret = auth_token.encode() if isinstance(auth_token, str) else b""
    except UnicodeEncodeError:
        secret = b""  # the error at hand would show it
    if not secret or len(secret) > MAX_SECRET or b"\n" in secret or b"\r" in secret:
        raise errors.InvalidArgumentError(
            f"auth_token must be one line of 1 to {MAX_SECRET} bytes of UTF-8 (its value is not shown)"
        )
    return secret


def checked_label(text: object, key: str) -> bytes:
    """Return a label as it is sent: one line, cut where it is too long.

    Raises:
        InvalidArgumentError: it is no text.
    """
    if not isinstance(text, str):
        raise _bad("label", text, key, "a text")
    if text.isascii() and text.isprintable() and len(text) <= MAX_LINE:
        return text.encode()  # nearly every one
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    return text.encode("utf-8", "replace")[:MAX_LINE].decode("utf-8", "ignore").encode()


def checked_text(text: object) -> bytes:
    """Return a text that is looked for as it is sent.

    Raises:
        InvalidArgumentError: it is none, or too long for one line.
    """
    if not isinstance(text, str) or not text.isprintable():
        raise errors.InvalidArgumentError(
            f"the text to look for is {shown(text)}: give one line of text"
        )
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_LINE:
        raise errors.InvalidArgumentError(
            f"the text to look for has {len(data)} bytes, {MAX_LINE} are allowed"
        )
    return data


def checked_owner(owner: object, key: str) -> Owner:
    """Return who asks, as it is sent.

    Raises:
        InvalidArgumentError: it is no name and number.
    """
    if isinstance(owner, tuple) and len(owner) == 2:
        name, attempt = owner
        if _is_name(name, MAX_OWNER) and _is_whole(attempt, 0, MAX_ATTEMPT):
            return new(Owner, (name.encode(), attempt, 0))
    elif isinstance(owner, tuple) and len(owner) == 3 and _is_whole(owner[2], 1, MAX_AGE):
        return checked_owner(owner[:2], key)._replace(age=owner[2])
    wanted = (
        f"(name, attempt), a name of 1 to {MAX_OWNER} printable ASCII characters without space and "
        f"a whole number from 0 to {MAX_ATTEMPT}"
    )
    raise _bad("owner", owner, key, wanted)


def _bad(name: str, value: object, key: str, wanted: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"{name} is {shown(value)} for lock {key!r}: give {wanted}", key=key
    )


def _is_name(value: object, longest: int) -> TypeGuard[str]:
    """Whether it is a text of printable ASCII characters without space."""
    return (
        isinstance(value, str)
        and value.isascii()
        and value.isprintable()
        and " " not in value
        and 0 < len(value) <= longest
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object, lowest: int, highest: int) -> bool:
    is_whole = type(value) is int or (isinstance(value, int) and not isinstance(value, bool))
    return is_whole and lowest <= value <= highest  # type: ignore[operator]
