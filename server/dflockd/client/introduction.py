"""Who asks, as a connection says it ahead of a request: a label for people, an owner for the server.

A connection says only what is not what it said before: most say nothing, and those of a pool say what
the next lock has and the one before had not.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from dflockd.wire import Label, Owner, encode_request

NOBODY = Owner(b"", 0)


class Introduction(NamedTuple):
    """What a lock has its connection say."""

    label: bytes = b""
    """What people see."""
    owner: Owner = NOBODY
    """Whose run it is; which process asks is added when that is said."""

    def after(self, said: Introduction) -> tuple[bytes, ...]:
        """Return the requests that say this on a connection which has said that.

        Of a label first, which servers of 0.1 know as well: who refuses it knows neither.
        """
        label = encode_request(Label(self.label))
        if self.owner == said.owner:
            return (label,)
        owner = self.owner._replace(instance=_instance()) if self.owner.id else NOBODY
        return label, encode_request(owner)


ANONYMOUS = Introduction()
"""What a new connection has said."""

_names: dict[str, bytes] = {}


def _instance() -> bytes:
    """Return a name for this process that no other has.

    A server lets a process that has lost its connection go on in its own position.
    """
    return _names.get("it") or _names.setdefault("it", os.urandom(8).hex().encode())


def forget_instance() -> None:
    """Have another name from now on: after a fork the old one is the parent's."""
    _names.clear()
