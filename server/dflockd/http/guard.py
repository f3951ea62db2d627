"""Who may see and do what over HTTP, and what browsers are told so that nobody else does."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from aiohttp import web

from dflockd.http.gate import Gate
from dflockd.server import SparingLog

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN = ("/healthz", "/readyz")
"""What needs no token and no name: orchestrators ask, and there is nothing in it to know."""

PAUSE = 0.1
"""Seconds between a wrong secret and the answer: guessing takes its time."""

GATE = web.RequestKey("gate", Gate)
"""Through which gate a request has come."""

WHO = web.RequestKey("who", str)
"""Who asks, for the log."""

_PRIVATE = (".localhost", ".internal", ".svc", ".svc.cluster.local")
"""Ends of names that the public name system does not have, so that nobody can buy one."""

HEADERS = {
    # Everything comes from this server, nothing is inline, and nobody frames it.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # What is held now is worth nothing in a moment, and none of a cache's business.
    "Cache-Control": "no-store",
    "Server": "dflockd",
}

_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]*)?")
"""A name or an address, and a port: what browsers make of the address of a page."""


async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """Give every answer, errors too, what browsers are to know."""
    response.headers.update(HEADERS)


def guard(
    secret_now: Callable[[], bytes | None], host: str, log: SparingLog
) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the middleware that lets requests through, or not.

    Args:
        secret_now: what a request must show, as a bearer token or as a password. Without one, anyone
            who reaches the port may look; but no browser may be led here by a name that somebody
            else has pointed to this address (DNS rebinding).
        host: the name that the server was given for its address.
        log: where wrong secrets are reported.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN:
            return await handler(request)
        peer, secret = request.remote or "somebody", secret_now()
        if secret is None:
            if not _is_own_name(_asked_name(request), host):
                raise web.HTTPMisdirectedRequest(
                    text="421: not the name of this server: ask for it by its address, "
                    "or set --auth-token-file or --http-host\n"
                )
            request[WHO] = peer
        else:
            name = _authenticated(request, secret)
            if name is None:
                if "Authorization" in request.headers:
                    log.warning("%s: wrong auth token", peer)
                    # Meanwhile it may lose its connection to somebody who needs one.
                    request[GATE].relent()
                    await asyncio.sleep(PAUSE)
                challenge = {"WWW-Authenticate": 'Basic realm="dflockd", charset="UTF-8"'}
                raise web.HTTPUnauthorized(
                    text="401: the auth token is needed, as bearer token, or as password "
                    "behind any name\n",
                    headers=challenge,
                )
            request[GATE].trusted = True
            request[WHO] = f"{name!r} at {peer}" if name else peer
        if not (_is_harmless(request) or _is_own_page(request)):
            raise web.HTTPForbidden(text="403: a page of another site may not do this\n")
        return await handler(request)

    return middleware


def _authenticated(request: web.Request, secret: bytes) -> str | None:
    """Return the name that was given along with the right secret, which may be empty."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    name, shown = "", given.strip().encode(errors="surrogateescape")
    if scheme.lower() == "basic":
        try:
            user, _, shown = base64.b64decode(shown, validate=True).partition(b":")
        except binascii.Error:
            return None
        # The name goes to the log: not so the secret, of which somebody may have made a name, too.
        name = user.decode(errors="replace")[:64] if secret not in user else ""
    elif scheme.lower() != "bearer":
        return None
    return name if hmac.compare_digest(shown, secret) else None


def _asked_name(request: web.Request) -> str:
    # Not `request.host`: where a request names none, that asks the name service, and all wait.
    return request.headers.get("Host", "")


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


def _is_harmless(request: web.Request) -> bool:
    """Whether a request changes nothing, and only the viewer of the page sees its answer."""
    if request.method not in ("GET", "HEAD"):
        return False
    # Another page may lead here. It may not ask in the background: how long a search takes tells.
    asks = request.path.startswith("/api/") or request.path == "/metrics"
    return not asks or request.headers.get("Sec-Fetch-Mode") == "navigate"


def _is_own_page(request: web.Request) -> bool:
    """Whether what asks is no page of another site: a browser says where it comes from."""
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("Origin")
    return origin is None or origin.partition("://")[2] == _asked_name(request)
