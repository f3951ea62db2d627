"""How the server meets the network."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

from dflockd.files import SecretFile

ROOM_FOR_SECRETS = 768
"""Bytes of a secret that are expected at least where it may be exchanged for a longer one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the server meets the network; times in seconds."""

    host: str = "0.0.0.0"
    port: int = 6388
    """0 lets the system choose."""
    unix_socket: str | None = None
    """Path of a socket to listen on as well."""
    unix_socket_mode: int | None = None
    """Its permissions; without it, what the umask leaves."""
    read_timeout: int = 23
    """For the rest of a request, once its first byte is there."""
    write_timeout: int = 5
    """For a peer that does not read its replies; 0 waits forever."""
    shutdown_timeout: int = 8
    """For holders to release while draining; 0 waits forever."""
    sweep_interval: int = 1
    """The expiry timer sleeps no longer than this."""
    max_connections: int = 0
    """Connections that are in; 0 is no limit."""
    max_pending: int = 1024
    """Room beside those for connections that have not got through TLS, or not shown the secret."""
    auth_timeout: int = 10
    """For a peer to get through TLS and to show the secret."""
    auth_secret: bytes | SecretFile | None = field(default=None, repr=False)
    """What clients have to show; see `secret`."""
    tls: ssl.SSLContext | None = None

    def secret(self) -> bytes | None:
        """Return what clients have to show, as its file says now; ``None`` lets everybody in."""
        return (
            self.auth_secret.read()
            if isinstance(self.auth_secret, SecretFile)
            else self.auth_secret
        )

    @property
    def secret_size(self) -> int:
        """How many bytes of it a client may send."""
        if isinstance(self.auth_secret, SecretFile):
            return max(ROOM_FOR_SECRETS, len(self.auth_secret.latest))
        return len(self.auth_secret or b"")
