#!/usr/bin/env python3
"""Whether the lock server of this container answers; for Docker's health check and exec probes.

It asks where the server's own variables say, over DFLOCKD_UNIX_SOCKET if that is set, and with its
auth token. Any answer will do, a refusal as well, and so will a connection that the server ends: its
event loop lives. Over TLS the first answer of the handshake is enough, so that no certificate is
needed. Only silence, or nobody who listens, is ill.
"""

import contextlib
import os
import socket
import ssl
import sys
from pathlib import Path

PATIENCE = 2.0
"""Seconds that the server may take to accept, and again for each answer."""


def ask() -> None:
    """Send a ping and wait for what comes of it; an OSError if nothing does."""
    secret = os.environb.get(b"DFLOCKD_AUTH_TOKEN", b"")  # it need not be text
    if path := os.environ.get("DFLOCKD_AUTH_TOKEN_FILE"):
        secret = Path(path).read_bytes().rstrip(b"\r\n")
    with connect() as connection:
        if "DFLOCKD_TLS_CERT" in os.environ and not os.environ.get("DFLOCKD_UNIX_SOCKET"):
            connection.sendall(hello())
        else:
            connection.sendall((b"auth\n_\n%s\n" % secret if secret else b"") + b"ping\n_\n_\n")
        connection.recv(64)


def hello() -> bytes:
    """Return what a TLS client begins with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(received, sent).do_handshake()
    return sent.read()


def connect() -> socket.socket:
    """Return a connection to the server."""
    if path := os.environ.get("DFLOCKD_UNIX_SOCKET"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        connection.connect(path)
        return connection
    # Linux takes 0.0.0.0 and :: for the machine itself.
    where = os.environ.get("DFLOCKD_HOST", "0.0.0.0"), int(os.environ.get("DFLOCKD_PORT", "6388"))
    return socket.create_connection(where, PATIENCE)


def main() -> int:
    """Return the exit status: 0 if the server lives, else 1."""
    try:
        ask()
    except ConnectionResetError:
        return 0
    except OSError as exc:
        print(f"the lock server does not answer: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
