"""Whether a request over HTTP may see or do what it wants."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import re
from collections.abc import Callable

from dflockd.http.answers import AnswerError, text
from dflockd.http.gate import Gate
from dflockd.http.head import HttpRequest
from dflockd.server import SparingLog

OPEN = ("/healthz", "/readyz")
"""What needs no token and no name: orchestrators ask, and there is nothing in it to know."""

PAUSE = 0.1
"""Seconds between a wrong secret and the answer: guessing takes its time."""

_PRIVATE = (".localhost", ".internal", ".svc", ".svc.cluster.local")
"""Ends of names that the public name system does not have, so that nobody can buy one."""

_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]*)?")
"""A name or an address, and a port: what browsers make of the address of a page."""


class Guard:
    """Lets requests through, or not.

    Args:
        secret_now: what a request must show, as a bearer token or as a password. Without one, anyone
            who reaches the port may look; but no browser may be led here by a name that somebody
            else has pointed to this address (DNS rebinding).
        host: the name that the server was given for its address.
        log: where wrong secrets are reported.
    """

    def __init__(self, secret_now: Callable[[], bytes | None], host: str, log: SparingLog) -> None:
        self._secret_now = secret_now
        self._host = host
        self._log = log

    async def check(self, request: HttpRequest, gate: Gate) -> None:
        """Let a request through, and say in it who asks.

        Raises:
            AnswerError: it is not let through.
        """
        if request.path in OPEN:
            return
        secret = self._secret_now()
        request.who = gate.peer
        if secret is None:
            if not _is_own_name(_asked_name(request), self._host):
                said = (
                    "not the name of this server: ask for it by its address, "
                    "or set --auth-token-file or --http-host"
                )
                raise AnswerError(text(421, said))
        else:
            name = _authenticated(request, secret)
            if name is None:
                if "authorization" in request.headers:
                    self._log.warning("%s: wrong auth token", gate.peer)
                    # Meanwhile it may lose its connection to somebody who needs one.
                    gate.relent()
                    await asyncio.sleep(PAUSE)
                said = "the auth token is needed, as bearer token, or as password behind any name"
                challenge = 'Basic realm="dflockd", charset="UTF-8"'
                raise AnswerError(text(401, said, WWW_Authenticate=challenge))
            gate.trusted = True
            if name:
                request.who = f"{name!r} at {gate.peer}"
        if not (_is_harmless(request) or _is_own_page(request)):
            raise AnswerError(text(403, "a page of another site may not do this"))


def _authenticated(request: HttpRequest, secret: bytes) -> str | None:
    """Return the name that was given along with the right secret, which may be empty."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    user, shown = b"", given.strip().encode(errors="surrogateescape")
    if scheme.lower() == "basic":
        try:
            user, _, shown = base64.b64decode(shown, validate=True).partition(b":")
        except binascii.Error:
            return None
    elif scheme.lower() != "bearer":
        return None
    if not hmac.compare_digest(shown, secret):
        return None
    # The name goes to the log: not so the secret, of which somebody may have made a name, too. Only
    # here is it looked for, where it was shown: how long that takes reveals it.
    return user.decode(errors="replace")[:64] if secret not in user else ""


def _asked_name(request: HttpRequest) -> str:
    return request.headers.get("host", "")


def _is_own_name(asked: str, host: str) -> bool:
    """Whether the name by which a browser came here can only be of those who run the server."""
    if not asked:
        return True  # a browser says one
    found = _HOST.fullmatch(asked)
    if found is None:
        return False
    name = found[1].strip("[]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        name = name.removesuffix(".")
        return name == host.lower() or "." not in name or name.endswith(_PRIVATE)
    return True


def _is_harmless(request: HttpRequest) -> bool:
    """Whether a request changes nothing, and only the viewer of the page sees its answer."""
    if request.method not in ("GET", "HEAD"):
        return False
    # Another page may lead here. It may not ask in the background: how long a search takes tells.
    asks = request.path.startswith("/api/") or request.path == "/metrics"
    return not asks or request.headers.get("sec-fetch-mode") == "navigate"


def _is_own_page(request: HttpRequest) -> bool:
    """Whether what asks is no page of another site: a browser says where it comes from."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2] == _asked_name(request)
