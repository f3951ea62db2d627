"""The head of a request: what is let in, and what is refused before anything is done about it.

The server has use for very little of HTTP: no bodies, no chunks, no upgrades, no cookies, a handful
of headers. h11 says what a head means; all that this server has no use for is dropped or refused
here, by rules that are strict and few. What a request had in it is never part of a refusal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

import h11

MAX_TARGET = 8000
"""Bytes of a path with its query."""

MAX_HEAD = 32 * 1024
"""Bytes of a head, not counting what a long secret needs. Browsers send cookies of other servers."""

MAX_FIELDS = 100
"""Lines of a head."""

METHODS = frozenset(("GET", "HEAD", "DELETE", "OPTIONS", "PATCH", "POST", "PUT"))
"""Those that can be answered, if only with 405."""

READ = frozenset(("host", "authorization", "origin", "sec-fetch-mode", "sec-fetch-site"))
"""The headers that this server reads, each of which may be there once."""

_END = re.compile(rb"\n\r?\n")
_EMPTY = re.compile(rb"(?:\r\n)+")
# What h11 takes to be well-formed, and the next server may not: control characters, ends of lines
# without their other half, folded lines, and a length that is said twice.
_DOUBTFUL = re.compile(
    rb"[\0-\x08\x0b\x0c\x0e-\x1f\x7f]|[^\r]\n|\r[^\n]|\n[\t ]|\ncontent-length:[^\r]*,",
    re.IGNORECASE,
)


class RefusedHeadError(Exception):
    """A request that is refused unread; the text is for its sender and for the log."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(slots=True, eq=False)
class HttpRequest:
    """What somebody asks for."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Those of `READ` that there are."""
    state: h11.Connection = field(repr=False)
    """What the answer has to go by."""
    who: str = "somebody"
    """The name of the client that asks, for the log."""


class HeadReader:
    """Takes requests out of bytes that arrive.

    Args:
        secret: the length of the longest secret that a head can have in it.
    """

    def __init__(self, secret: int = 0) -> None:
        # As it is in base64, with a name of some length.
        self._most = MAX_HEAD + secret * 4 // 3
        self._buffer = bytearray()
        self._searched = 0

    @property
    def pending(self) -> int:
        """Bytes that are here and in no head yet."""
        return len(self._buffer)

    @property
    def is_full(self) -> bool:
        """Whether no head needs as much as is here."""
        return len(self._buffer) > self._most

    def receive(self, data: bytes) -> None:
        """Add what has arrived."""
        self._buffer += data

    def next_request(self) -> HttpRequest | None:
        """Return the next request, or ``None`` if its head is incomplete.

        Raises:
            RefusedHeadError: the connection is of no use any more.
        """
        buffer = self._buffer
        if buffer[:1] == b"\r":
            # Empty lines: clients of old send one behind what they take for a body.
            empty = _EMPTY.match(buffer)
            del buffer[: empty.end() if empty else 0]
        if not buffer or buffer == b"\r":
            return None
        if not 0x41 <= buffer[0] <= 0x5A:
            # TLS, or another protocol: not worth waiting for more.
            raise RefusedHeadError(400, "malformed request")
        end = _END.search(buffer, max(0, self._searched - 2))
        self._searched = len(buffer)
        if (end.end() if end else len(buffer)) > self._most:
            raise RefusedHeadError(431, "request header fields too large")
        if end is None:
            return None
        head = bytes(buffer[: end.end()])
        del buffer[: end.end()]
        self._searched = 0
        return _checked(head)


def _checked(head: bytes) -> HttpRequest:
    if _DOUBTFUL.search(head):
        raise RefusedHeadError(400, "malformed request")
    state = h11.Connection(h11.SERVER, max_incomplete_event_size=len(head) + 1)
    state.receive_data(head)
    try:
        event, _ = state.next_event(), state.next_event()  # and that there is no body
    except h11.RemoteProtocolError as exc:
        if exc.error_status_hint == 501:  # a transfer encoding that nobody knows
            raise RefusedHeadError(413, "request with a body") from None
        raise RefusedHeadError(400, "malformed request") from None
    if not isinstance(event, h11.Request):
        raise RefusedHeadError(400, "malformed request")
    method, target = event.method.decode(), event.target.decode()
    if len(target) > MAX_TARGET:
        raise RefusedHeadError(414, "request target too long")
    if event.http_version not in (b"1.0", b"1.1"):
        raise RefusedHeadError(505, "HTTP version not supported")
    if target[0] != "/" or "#" in target or not method.isupper():
        raise RefusedHeadError(400, "malformed request")
    if method not in METHODS:
        raise RefusedHeadError(501, "method not implemented")
    headers = _read(event)
    path, _, query = target.partition("?")
    try:
        path = unquote(path, errors="strict")
        fields = parse_qsl(query, keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        # In its place would stand the key of somebody else.
        raise RefusedHeadError(400, "request target that is not UTF-8") from None
    # Of several fields of one name the first one counts.
    return HttpRequest(method, path, dict(reversed(fields)), headers, state)


def _read(event: h11.Request) -> dict[str, str]:
    """Return the headers that are read, unless there is one that the server cannot serve."""
    if len(event.headers) > MAX_FIELDS:
        raise RefusedHeadError(431, "request header fields too large")
    headers: dict[str, str] = {}
    for raw, value in event.headers:
        name = raw.decode()
        if name in READ:
            if name in headers:
                raise RefusedHeadError(400, "malformed request")
            headers[name] = value.decode(errors="surrogateescape")
        elif name == "transfer-encoding" or (name == "content-length" and value.strip(b"0")):
            raise RefusedHeadError(413, "request with a body")
        elif name == "expect":
            raise RefusedHeadError(417, "request with an expectation")
    return headers
