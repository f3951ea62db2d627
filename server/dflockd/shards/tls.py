"""How etcd is spoken to in private. Apart from the store, for settings are read without its extra."""

from __future__ import annotations

from typing import NamedTuple


class EtcdTls(NamedTuple):
    """How to speak TLS with etcd; all of it is PEM.

    Attributes:
        ca: the authorities, one of which has signed the certificate of etcd.
        cert: this client's certificate, where etcd wants to see one.
        key: its key.
    """

    ca: bytes
    cert: bytes | None = None
    key: bytes | None = None

    def __repr__(self) -> str:
        """Without the key."""
        return "EtcdTls(...)"
