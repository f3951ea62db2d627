"""How the server meets the network."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field


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
    auth_secret: bytes | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
