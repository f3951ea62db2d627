"""TLS whose certificates can be exchanged while it is in use."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path


class TlsContext(ssl.SSLContext):
    """The server's side of TLS. What it begins with stays, what is new goes into `current`.

    Loading files into a context that is in use would not do: a pair that does not match would leave
    it half changed, and authorities can only be added.
    """

    expires_at: float = 0.0
    """Unix time until which its certificate is good; 0 while none is loaded."""
    current: TlsContext
    """What new connections get; itself at first."""

    @classmethod
    def new(cls) -> TlsContext:
        """Return one that has nothing loaded yet."""
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.current = context
        context.sni_callback = _switch
        # A client that resumes a session shows no certificate, and gets a new ticket: an expired
        # certificate would be good forever. With TLS 1.2 there is one ticket for two hours.
        context.num_tickets = 0
        return context


def _switch(
    connection: ssl.SSLObject, _name: str | None, context: ssl.SSLContext
) -> ssl.AlertDescription | None:
    # OpenSSL calls this once it has the first message of a handshake. The context is another by now
    # if the certificates were exchanged since the handshake was begun, before a word was said.
    if isinstance(context, TlsContext) and context.current is not context:
        if connection.session_reused:
            # By what the old one knows. The client makes a new session the next time.
            return ssl.AlertDescription.ALERT_DESCRIPTION_HANDSHAKE_FAILURE
        connection.context = context.current
    return None


def not_after(path: str) -> float:
    """Return until when the first certificate of a PEM file is good, in Unix time; 0 if unreadable.

    Python's `ssl` says so of nobody's certificate but the other side's.
    """
    try:
        block = _PEM.search(Path(path).read_text("ascii", "replace"))
        data = ssl.PEM_cert_to_DER_cert(block[0]) if block else b""
        at, _ = _inside(data, 0)  # the certificate
        at, _ = _inside(data, at)  # what is signed of it
        if data[at] == _VERSION:
            at = _inside(data, at)[1]
        for _ in range(3):  # serial number, algorithm, issuer
            at = _inside(data, at)[1]
        at, _ = _inside(data, at)  # validity
        at = _inside(data, at)[1]  # from when
        start, end = _inside(data, at)
        form = "%y%m%d%H%M%SZ" if data[at] == _UTC_TIME else "%Y%m%d%H%M%SZ"
        return datetime.strptime(data[start:end].decode(), form).replace(tzinfo=UTC).timestamp()
    except (OSError, ValueError, IndexError):
        return 0.0


_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17


def _inside(data: bytes, at: int) -> tuple[int, int]:
    """Return where the content of a DER item begins, and where the next item does."""
    length, at = data[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, at = int.from_bytes(data[at : at + size]), at + size
    return at, at + length
