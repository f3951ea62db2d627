"""The head of a request: what may reach the HTTP library, and what is refused before it does.

The server has use for very little of HTTP: no bodies, no chunks, no upgrades, no cookies, a handful
of headers. All else is dropped or refused here, by rules that are strict and few. What a request had
in it is never part of a refusal.
"""

from __future__ import annotations

import re

MAX_TARGET = 8000
"""Bytes of a path with its query."""

MAX_HEAD = 32 * 1024
"""Bytes of a head, not counting what a long secret needs. Browsers send cookies of other servers."""

MAX_FIELDS = 100
"""Lines of a head."""

METHODS = frozenset((b"GET", b"HEAD", b"DELETE", b"OPTIONS", b"PATCH", b"POST", b"PUT"))
"""Those that can be answered, if only with 405."""

READ = frozenset((b"host", b"authorization", b"origin", b"sec-fetch-mode", b"sec-fetch-site"))
"""The headers that this server reads. No other reaches the library."""

_END = re.compile(rb"\n\r?\n")
_EMPTY = re.compile(rb"(?:\r\n)+")
_REQUEST = re.compile(rb"([A-Z]{1,32}) (/[\x21-\x22\x24-\x7e]*) HTTP/1\.([01])")
_OTHER_VERSION = re.compile(rb"[A-Z]{1,32} [\x21-\x7e]+ HTTP/[0-9](\.[0-9])?")
# No blank in front of the colon, no folded line, no control character. Nothing of this backtracks.
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):([\t\x20-\x7e\x80-\xff]*)")
_ZERO = re.compile(rb"0{1,20}")
_DIGITS = re.compile(rb"[0-9]+")


class RefusedHeadError(Exception):
    """A request that is refused unread; the text is for its sender and for the log."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class HeadReader:
    """Takes heads out of bytes that arrive.

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

    def next_head(self) -> bytes | None:
        """Return the next head, with the headers that are read and no other; ``None`` if incomplete.

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


def _checked(head: bytes) -> bytes:
    if not head.endswith(b"\r\n\r\n"):
        raise RefusedHeadError(400, "malformed request")
    request, *lines = head[:-4].split(b"\r\n")
    if len(lines) > MAX_FIELDS:
        raise RefusedHeadError(431, "request header fields too large")
    is_modern = _check_request(request)
    fields: dict[bytes, bytes] = {}
    connection = b""
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise RefusedHeadError(400, "malformed request")
        name, value = field[1].lower(), field[2].strip(b" \t")
        if name in READ:
            if name in fields:
                raise RefusedHeadError(400, "malformed request")
            fields[name] = value
        elif name == b"connection":
            connection += b"," + value.lower()
        else:
            _check_body(name, value)
    if is_modern and b"host" not in fields:
        raise RefusedHeadError(400, "malformed request")
    options = {option.strip() for option in connection.split(b",")}
    if b"close" in options:
        fields[b"connection"] = b"close"
    elif b"keep-alive" in options and not is_modern:
        fields[b"connection"] = b"keep-alive"
    kept = (b"%s: %s\r\n" % field for field in fields.items())
    return b"%s\r\n%s\r\n" % (request, b"".join(kept))


def _check_request(line: bytes) -> bool:
    """Return whether a request line is of HTTP/1.1, not 1.0."""
    request = _REQUEST.fullmatch(line)
    if request is None:
        if len(line) > MAX_TARGET:
            raise RefusedHeadError(414, "request target too long")
        found = _OTHER_VERSION.fullmatch(line)
        if found and not line.endswith((b"HTTP/1.0", b"HTTP/1.1")):
            raise RefusedHeadError(505, "HTTP version not supported")
        raise RefusedHeadError(400, "malformed request")
    if len(request[2]) > MAX_TARGET:
        raise RefusedHeadError(414, "request target too long")
    if request[1] not in METHODS:
        raise RefusedHeadError(501, "method not implemented")
    return request[3] == b"1"


def _check_body(name: bytes, value: bytes) -> None:
    if name == b"content-length":
        if not _DIGITS.fullmatch(value):
            raise RefusedHeadError(400, "malformed request")
        if not _ZERO.fullmatch(value):
            raise RefusedHeadError(413, "request with a body")
    elif name == b"transfer-encoding":
        raise RefusedHeadError(413, "request with a body")
    elif name == b"expect":
        raise RefusedHeadError(417, "request with an expectation")
