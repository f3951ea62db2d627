"""Whether connections to the address that a server advertises reach it: it asks itself there.

Only this process can answer the question, so no other server is taken for it. Any connection may
ask it, even one without the shared secret: nothing secret is sent to a stranger that listens there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import ssl
from typing import NamedTuple

from dflockd.address import Address
from dflockd.files import certificates
from dflockd.shards.errors import network_problem
from dflockd.table import Identity
from dflockd.wire import Identify, UnexpectedReplyError, encode_request, parse_report, read_json
from dflockd.wire.messages import Report

TIMEOUT = 5.0
"""Seconds for one attempt."""

LOOKS = 5
"""Connections of one attempt, all of which have to lead to the server: behind a load balancer, or a
name that stands for several servers, one of them may get there by chance."""

RETRY = 1.0
"""Seconds between two of them, before it joins."""

EVERY = 60.0
"""Seconds between two of them, afterwards, on the average."""

REMIND = 60.0
"""Seconds after which the log says once more what is wrong."""

MAX_ANSWER = 1024
"""Bytes that are read."""

logger = logging.getLogger("dflockd.cluster")


class NotReachedError(Exception):
    """A connection to the address did not reach this server; the text says what happened."""


class Tls(NamedTuple):
    """What the server has for TLS: paths of its files."""

    cert: str
    key: str
    asks_for_certificates: bool


class FrontDoor:
    """Looks, again and again, whether a server is reached where it says.

    Args:
        address: what it advertises.
        identity: by what it is known.
        tls: what it has for TLS, if it speaks it.
        strict: whether it does not join before it was reached.

    Attributes:
        problem: what the latest attempt has met with; empty if it reached the server, ``None``
            before there was one.
    """

    def __init__(
        self, address: Address, identity: Identity, *, tls: Tls | None, strict: bool
    ) -> None:
        self.problem: str | None = None
        self._address = address
        self._identity = identity
        self._tls = tls
        self._strict = strict

    async def open(self) -> None:
        """Return once the server may join: when it was reached, or at once if it need not be."""
        told, said_at = "", 0.0
        now = asyncio.get_running_loop().time
        while not await self.look() and self._strict:
            assert self.problem is not None
            if self.problem != told or now() >= said_at + REMIND:
                told, said_at = self.problem, now()
                self._complain("and this server does not join the cluster until it does")
            await asyncio.sleep(RETRY)
        if self.problem:
            self._complain("and will not find this server there")

    async def watch(self) -> None:
        """Look now and then, forever, and tell what changes."""
        was_reached, failures = not self.problem, 0
        while True:
            await asyncio.sleep(EVERY * random.uniform(0.8, 1.2))
            # One failure may be a hiccup of the network.
            failures = 0 if await self.look() else failures + 1
            if not failures and not was_reached:
                logger.info("--advertise %s: reached again", self._address)
                was_reached = True
            elif failures > 1:
                was_reached = False
                self._complain("and do not find this server there")

    async def look(self) -> bool:
        """Try once; return whether the server was reached."""
        try:
            async with asyncio.timeout(TIMEOUT):
                for _ in range(LOOKS):
                    await self._ask()
        except TimeoutError:
            self.problem = f"no answer within {TIMEOUT:g} s"
        except NotReachedError as exc:
            self.problem = str(exc)
        except OSError as exc:
            self.problem = network_problem(exc)
        except UnicodeError:
            self.problem = "its name cannot be resolved"
        else:
            self.problem = ""
        return not self.problem

    def _complain(self, consequence: str) -> None:
        mode = "warn" if self._strict else "off"
        logger.error(
            "--advertise %s does not lead here: %s. Clients are sent there, %s. Correct --advertise; "
            "or set --advertise-check %s if clients reach it and only this machine does not",
            *(self._address, self.problem, consequence, mode),
        )

    async def _ask(self) -> None:
        context = _context(self._tls) if self._tls is not None else None
        name = self._address.host if context is not None else None
        reader, writer = await asyncio.open_connection(
            *self._address, limit=MAX_ANSWER, ssl=context, server_hostname=name
        )
        try:
            nonce = secrets.token_hex(16).encode()
            writer.write(encode_request(Identify(nonce)))
            line = await self._answer(reader, writer)
        finally:
            writer.transport.abort()
        if line is None:
            return
        if not line:
            raise NotReachedError("the connection is closed without an answer")
        try:
            reply = parse_report(line.removesuffix(b"\n"))
            proof = read_json(reply.json).get("proof") if isinstance(reply, Report) else None
        except (UnexpectedReplyError, ValueError, AttributeError):
            raise NotReachedError(f"something else answers there: {line[:40]!r}") from None
        if proof != self._identity.prove(nonce).decode():
            raise NotReachedError("another lock server answers there")

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes | None:
        """Return the line that comes; ``None`` if the certificate there has to be answer enough."""
        # While the handshake is the last thing there was: after an alert nobody knows what was shown.
        speaks_tls = writer.get_extra_info("ssl_object")
        shown = None if speaks_tls is None else speaks_tls.getpeercert(True)
        try:
            line = await reader.readline()
        except ValueError:
            raise NotReachedError("something else answers there: an endless line") from None
        except (ssl.SSLError, ConnectionError):
            if self._tls is None or not self._tls.asks_for_certificates:
                raise
            line = b""
        if line or self._tls is None or not self._tls.asks_for_certificates:
            return line
        # The server asks for a certificate that it does not have itself. What it shows is not secret,
        # but a server with that certificate has its key.
        if [shown] != (await asyncio.to_thread(certificates, self._tls.cert))[:1]:
            raise NotReachedError("another certificate than that of --tls-cert is shown there")
        return None


def _context(tls: Tls) -> ssl.SSLContext:
    # Whom it finds there is proved by the answer, and nothing secret is sent.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if tls.asks_for_certificates:
        with contextlib.suppress(OSError):
            context.load_cert_chain(tls.cert, tls.key, password="")
    return context
