"""What a request for a slot says of its client: a label for people, an owner for the server."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from dflockd.wire import Owner

new: Final = tuple.__new__
"""Makes a named tuple of its fields. Its class does so by a function in Python, which takes three
times as long: this is for what is made for each lock."""


class Introduction(NamedTuple):
    """What a lock says of who asks for it."""

    label: bytes = b""
    """What people see."""
    owner: Owner | None = None
    """Whose run it is."""


ANONYMOUS = Introduction()

_names: dict[str, bytes] = {}


def instance() -> bytes:
    """Return a name for this process that no other has.

    A server lets a process that has lost its connection go on in its own position.
    """
    return _names.get("it") or _names.setdefault("it", os.urandom(8).hex().encode())


def forget_instance() -> None:
    """Have another name from now on: after a fork the old one is the parent's."""
    _names.clear()
