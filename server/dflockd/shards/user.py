"""As whom etcd is asked. Apart from the store, for settings are read without its extra."""

from __future__ import annotations

from typing import NamedTuple


class EtcdUser(NamedTuple):
    """A user of etcd, where it has some.

    Attributes:
        name: who it is.
        password: what proves it.
    """

    name: str
    password: str

    def __repr__(self) -> str:
        """Without the password."""
        return f"EtcdUser({self.name!r}, ...)"
