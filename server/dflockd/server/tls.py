"""TLS whose certificates can be exchanged while it is in use."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

peer: ContextVar[socket.socket] = ContextVar("peer")
"""The socket of the connection whose handshake is done in this context."""


class _Handshaker(ssl.SSLObject):
    """Says to the peer why a handshake fails: event loops close the socket without a word."""

    outgoing: ssl.MemoryBIO

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            if self.outgoing.pending:
                with contextlib.suppress(LookupError, OSError):
                    peer.get().send(self.outgoing.read())
            raise


class TlsContext(ssl.SSLContext):
    """The server's side of TLS. What it begins with stays, what is new goes into `current`.

    Loading files into a context that is in use would not do: a pair that does not match would leave
    it half changed, and authorities can only be added.
    """

    first: TlsContext
    """The one that the server began with, which has `current` and `renew`; itself at first."""
    current: TlsContext
    """What new connections get."""
    renew: Callable[[], None] | None = None
    """Looks whether there is something new for `current`, before each connection."""
    good_until: Mapping[str, float]
    """When a certificate in it expires first, in Unix time, by the setting that names its file."""

    sslobject_class = _Handshaker

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *others: Any, **named: Any
    ) -> ssl.SSLObject:
        """As that of the base class; where it sends to is kept, too."""
        made = super().wrap_bio(incoming, outgoing, *others, **named)
        assert isinstance(made, _Handshaker)
        made.outgoing = outgoing
        return made

    @classmethod
    def new(cls) -> TlsContext:
        """Return one that has nothing loaded yet."""
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.first = context.current = context
        context.good_until = {}
        context.sni_callback = _switch
        # A client that resumes a session shows no certificate, and gets a new ticket: an expired
        # certificate would be good forever. With TLS 1.2 there is one ticket for two hours.
        context.num_tickets = 0
        return context

    def exchange(self, new: TlsContext) -> None:
        """Have new connections get another one. It knows this one, and so of whatever comes later."""
        new.first = self
        self.current = new


def _switch(
    connection: ssl.SSLObject, _name: str | None, context: ssl.SSLContext
) -> ssl.AlertDescription | None:
    # OpenSSL calls this once it has the first message of a handshake. The context is another by now
    # if the certificates were exchanged since the handshake was begun, before a word was said.
    assert isinstance(context, TlsContext)
    first = context.first
    if first.renew is not None:
        first.renew()
    if first.current is not context:
        if connection.session_reused:
            # By what the old one knows. The client makes a new session the next time.
            return ssl.AlertDescription.ALERT_DESCRIPTION_HANDSHAKE_FAILURE
        connection.context = first.current
    return None
