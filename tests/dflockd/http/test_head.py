"""What of a request's head is let in, and what is refused: of any bytes one or the other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.http.answers import Response, encoded
from dflockd.http.head import (
    MAX_FIELDS,
    MAX_HEAD,
    MAX_TARGET,
    METHODS,
    READ,
    HeadReader,
    RefusedHeadError,
)

REFUSALS = {
    "malformed request",
    "request header fields too large",
    "request target that is not UTF-8",
    "request target too long",
    "request with a body",
    "request with an expectation",
    "HTTP version not supported",
    "method not implemented",
}


Told = tuple[str, str, dict[str, str], dict[str, str], bool]
"""Method, path, query and headers of a request, and whether the connection ends with it."""


def heads(*pieces: bytes) -> tuple[list[Told], int]:
    """Return what is let in, and the status of the refusal that ends it; 0 for none."""
    reader, found = HeadReader(), []
    for piece in pieces:
        reader.receive(piece)
        try:
            while (request := reader.next_request()) is not None:
                _, is_last = encoded(Response(b"ok"), request)
                told = request.method, request.path, request.query, request.headers, is_last
                found.append(told)
        except RefusedHeadError as exc:
            refusal = exc
            break
    else:
        return found, 0
    assert refusal.reason in REFUSALS, "nothing of a request is in its refusal"
    return found, refusal.status


def with_fields(*lines: str, version: str = "1.1") -> bytes:
    return "\r\n".join((f"GET / HTTP/{version}", "Host: a", *lines, "", "")).encode("latin-1")


def test_only_what_is_read_is_let_in() -> None:
    told = with_fields(
        "User-Agent: x", "AUTHORIZATION:\t Bearer x \t", "Cookie: a=b", "Upgrade: h2c"
    )
    headers = {"host": "a", "authorization": "Bearer x"}
    assert heads(told) == ([("GET", "/", {}, headers, False)], 0)


def test_what_stands_in_a_target() -> None:
    told = b"GET /a%2Fb%20c?key=%41+b&key=2&x=&y%3d=%c3%bc HTTP/1.1\r\nHost: a\r\n\r\n"
    query = {"key": "A b", "x": "", "y=": "\u00fc"}
    assert heads(told) == ([("GET", "/a/b c", query, {"host": "a"}, False)], 0)


@pytest.mark.parametrize(
    ("version", "value", "ends"),
    [
        ("1.1", "close", True),
        ("1.1", "Upgrade, Close", True),
        ("1.1", "keep-alive", False),
        ("1.0", "Keep-Alive", True),
        ("1.0", "Keep-Alive, close", True),
        ("1.0", "", True),
    ],
)
def test_whether_the_connection_goes_on(version: str, value: str, ends: bool) -> None:
    ((*_, is_last),), status = heads(with_fields(f"Connection: {value}", version=version))
    assert (is_last, status) == (ends, 0)


@pytest.mark.parametrize(
    "line",
    [
        "Authorization : Bearer x",
        " Authorization: Bearer x",
        "Authorization: Bearer\r\n x",
        "Authorization: Bearer \0x",
        "Authorization: Bearer \x7fx",
        "Authorization: a\rb: c",
        "Authorization: a\nb: c",
        "Authorization",
        ": x",
        "Auth\xf6rization: x",
        "Authorization: x\r\nAuthorization: x",
        "Host: b",
        "Content-Length: -1",
        "Content-Length: +0",
        "Content-Length: 0, 0",
        "Content-Length:",
    ],
)
def test_a_malformed_field(line: str) -> None:
    assert heads(with_fields(line)) == ([], 400)


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1 ",
        b"GET  / HTTP/1.1",
        b"GET\t/ HTTP/1.1",
        b"GET /a b HTTP/1.1",
        b"GET /\xff HTTP/1.1",
        b"GET /\0 HTTP/1.1",
        b"GET /a#b HTTP/1.1",
        b"GET http://127.0.0.1/ HTTP/1.1",
        b"GET * HTTP/1.1",
        b"CONNECT a:1 HTTP/1.1",
        b"Get / HTTP/1.1",
        b"get / HTTP/1.1",
        b"GET /",
        b"\x16\x03\x01",
        b"PING",
    ],
)
def test_a_malformed_request_line(line: bytes) -> None:
    assert heads(line + b"\r\nHost: a\r\n\r\n") == ([], 400)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\n", 505),
        (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 505),
        (b"BREW / HTTP/1.1\r\nHost: a\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: a\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\n\r\n", 400),
        (b"GET /" + b"x" * MAX_TARGET + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        (b"GET /%ff HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /?key=%ed%a0%80 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (with_fields("Content-Length: 1"), 413),
        (with_fields("Transfer-Encoding: chunked"), 413),
        (with_fields("Transfer-Encoding: identity"), 413),
        (with_fields("Expect: 100-continue"), 417),
        (with_fields(*("X: y" for _ in range(MAX_FIELDS))), 431),
        (with_fields("X: " + "y" * MAX_HEAD), 431),
        (b"GET /" + b"x" * MAX_HEAD, 431),
    ],
)
def test_what_is_refused_for_what_it_is(request_: bytes, status: int) -> None:
    assert heads(request_) == ([], status)


def test_a_head_that_does_not_begin_is_not_waited_for() -> None:
    assert heads(b"\x16") == ([], 400)
    assert heads(b"\r\n") == ([], 0)


def test_a_long_secret_has_its_room() -> None:
    reader = HeadReader(secret=60_000)
    reader.receive(with_fields("Authorization: Basic " + "x" * 80_000))
    assert reader.next_request()


def test_no_body_is_no_body() -> None:
    found, status = heads(with_fields("Content-Length: 0"))
    assert (len(found), status) == (1, 0)


SIGNS = st.sampled_from(b"\r\n :\t\0/aAH1.\xff")
LINES = st.sampled_from(
    [
        b"GET / HTTP/1.1\r\n",
        b"HEAD /a?b=c HTTP/1.0\r\n",
        b"Host: a\r\n",
        b"Authorization: Bearer x\r\n",
        b"Content-Length: 0\r\n",
        b"\r\n",
    ]
)
STREAMS = st.lists(
    LINES | st.binary(max_size=8) | st.lists(SIGNS, max_size=8).map(bytes), max_size=12
).map(b"".join)


@given(STREAMS)
def test_any_bytes_are_let_in_clean_or_refused(stream: bytes) -> None:
    found, _ = heads(stream)
    for method, path, _query, headers, _ in found:
        assert method in METHODS
        assert path.startswith("/")
        assert headers.keys() <= READ
        assert not any(set(value) & set("\0\r\n") for value in headers.values())


@given(STREAMS, st.data())
def test_how_bytes_are_cut_does_not_matter(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert heads(*pieces) == heads(stream)
