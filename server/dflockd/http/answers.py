"""What a request is answered with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

import h11

from dflockd.http.head import HttpRequest

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
"""What browsers are told with every answer, so that nobody else sees or does what they may."""


class Response(NamedTuple):
    """An answer: all of it is there before any of it is sent."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = {}
    """Besides `HEADERS`."""


class AnswerError(Exception):
    """A request that is answered with something else than it asks for."""

    def __init__(self, answer: Response) -> None:
        super().__init__(answer.status)
        self.answer = answer


def text(status: int, said: str = "", **headers: str) -> Response:
    """Return a short answer for people."""
    said = said or HTTPStatus(status).phrase
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(f"{status}: {said}\n".encode(), status=status, headers=named)


def of_json(found: object, status: int = 200, **headers: str) -> Response:
    """Return data; text is JSON already."""
    body = found if isinstance(found, str) else json.dumps(found)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(body.encode(), "application/json; charset=utf-8", status, named)


def refused(status: int, why: str, **headers: str) -> Response:
    """Return why a request of a program is refused."""
    return of_json({"error": why}, status, **headers)


def encoded(answer: Response, request: HttpRequest | None = None) -> tuple[bytes, bool]:
    """Return the bytes of the answer to a request, and whether a connection ends with that.

    It does without a request: that was refused before anybody knew what it is.
    """
    headers = {
        **HEADERS,
        "Date": formatdate(usegmt=True),
        "Content-Type": answer.kind,
        "Content-Length": str(len(answer.body)),
        **answer.headers,
    }
    if request is None:
        headers["Connection"] = "close"
    state = h11.Connection(h11.SERVER) if request is None else request.state
    reason = HTTPStatus(answer.status).phrase.encode()
    head = h11.Response(status_code=answer.status, headers=list(headers.items()), reason=reason)
    data = state.send(head) or b""
    if request is None or request.method != "HEAD":
        data += state.send(h11.Data(data=answer.body)) or b""
    state.send(h11.EndOfMessage())
    return data, state.our_state is h11.MUST_CLOSE
