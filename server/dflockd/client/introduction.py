"""Who asks, as a connection says it ahead of a request: a label for people, an owner for the server.

A connection says only what is not what it said before: most say nothing, and those of a pool say what
the next lock has and the one before had not.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from dflockd.wire import Label, Owner, encode_owner, encode_request

new: Final = tuple.__new__
"""Makes a named tuple of its fields. Its class does so by a function in Python, which takes three
times as long: this is for what is made for each lock."""

NOBODY = Owner(b"", 0)
UNSPEAKABLE = b"_"
"""A label that the request of an owner cannot carry: it stands there for none."""


class Opening(NamedTuple):
    """What is said of who asks, ahead of a request."""

    requests: tuple[bytes, ...] = ()
    has_owner: bool = False
    """Whether the last of them names an owner."""


NOTHING = Opening()


class Introduction(NamedTuple):
    """What a lock has its connection say."""

    label: bytes = b""
    """What people see."""
    owner: Owner = NOBODY
    """Whose run it is; which process asks is added when that is said."""

    def after(self, said: Introduction, knows_owners: bool | None) -> Opening:
        """Return what says this on a connection which has said that.

        One request says all of it to a server that knows owners. Others are told the label first:
        those of 0.1 know it as well, and who refuses it knows neither.

        Args:
            said: what the connection has said.
            knows_owners: whether its server does; ``None`` if that is not known.
        """
        name, owner = self
        run, attempt, _, _, age = owner
        if owner != said.owner:
            instance = _names.get("it") or _instance()
            if knows_owners and name != UNSPEAKABLE:
                # As nearly all runs of tasks say it.
                return new(Opening, ((encode_owner(run, attempt, instance, name, age),), True))
            label = encode_request(Label(name))
            if knows_owners is False:
                return NOTHING if name == said.label else Opening((label,))
            return Opening((label, encode_owner(run, attempt, instance, None, age)), True)
        return Opening((encode_request(Label(name)),))


ANONYMOUS = Introduction()
"""What a new connection has said."""


_names: dict[str, bytes] = {}


def _instance() -> bytes:
    """Return a name for this process that no other has.

    A server lets a process that has lost its connection go on in its own position.
    """
    return _names.setdefault("it", os.urandom(8).hex().encode())


def forget_instance() -> None:
    """Have another name from now on: after a fork the old one is the parent's."""
    _names.clear()
