"""What is sent to the HTTP port is in no log, and no flood of it fills one."""

from __future__ import annotations

import base64
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.dflockd.http.http_here import site_here
from tests.dflockd.http.http_site import SECRET, Site, StartSite, basic, bearer
from tests.dflockd.raw_server import PATIENCE, ServerProcess

MARK = "Mark3dT0ken"
ENCODED = base64.b64encode(f"{MARK}:{MARK}".encode()).decode()

MALFORMED = [
    f"GET / HTTP/1.1\r\nHost: a\r\nAuthorization : Bearer {MARK}\r\n\r\n",
    f"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \0{MARK}\r\n\r\n",
    f"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer\r\n {MARK}\r\n\r\n",
    f"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {MARK}\n\n",
    f"GET / HTTP/1.1\r\nHost: a\r\n{MARK}\r\n\r\n",
    f"GET / HTTP/1.1\r\nHost: a\r\n{MARK}\xff: x\r\n\r\n",
    f"GET /\0{MARK} HTTP/1.1\r\nHost: a\r\n\r\n",
    f"GET http://[{MARK}/ HTTP/1.1\r\nHost: a\r\n\r\n",
    f"GET / HTTP/{MARK}\r\nHost: a\r\n\r\n",
    f"{MARK.upper()} / HTTP/1.1\r\nHost: a\r\n\r\n",
    f"{MARK}\r\n\r\n",
    f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {MARK}\r\n\r\n",
    f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 11\r\n\r\n{MARK}",
    f"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: {MARK}\r\n\r\n",
    f"GET / HTTP/1.1\r\nHost: a\r\nExpect: {MARK}\r\n\r\n",
    f"GET /{MARK * 1000} HTTP/1.1\r\nHost: a\r\n\r\n",
    f"GET / HTTP/1.1\r\nHost: a\r\nX: {MARK * 5000}\r\n\r\n",
]

# Well-formed, and still nothing to repeat.
REFUSED = [
    f"GET //[{MARK}/ HTTP/1.1\r\nHost: a\r\n\r\n",
    f"GET /{MARK}?{MARK} HTTP/1.1\r\nHost: {MARK}.example\r\nAuthorization: Bearer {MARK}\r\n\r\n",
    f"GET /api/locks/{MARK}?space={MARK} HTTP/1.1\r\nHost: a\r\nAuthorization: {MARK}\r\n\r\n",
    f"GET /api/locks?limit={MARK} HTTP/1.1\r\nHost: a\r\nAuthorization: Basic {ENCODED}\r\n\r\n",
    f"GET /api/locks?sort={MARK} HTTP/1.1\r\nHost: a\r\nAuthorization: Basic {MARK}\r\n\r\n",
    f"DELETE /api/lock?key={MARK}&fence={MARK} HTTP/1.1\r\nHost: a\r\nOrigin: http://[{MARK}\r\n\r\n",
    f"PUT /%{MARK}/%00 HTTP/1.1\r\nHost: a:{MARK}\r\nReferer: {MARK}\r\n\r\n",
    f"GET /healthz?{MARK} HTTP/1.1\r\nHost: {MARK}\r\n\r\n",
]


def exchange(site: Site, sent: bytes) -> bytes:
    """Send bytes on a connection of their own, and return all that comes back."""
    where = urlsplit(site.url)
    with socket.create_connection((where.hostname, where.port), PATIENCE) as connection:
        connection.sendall(sent)
        received = b""
        try:
            while data := connection.recv(65536):
                received += data
                head, found, body = received.partition(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                if found and (sent.startswith(b"HEAD ") or len(body) >= int(length or b"0")):
                    break
        except ConnectionResetError:
            pass
        return received


def status_of(answer: bytes) -> int:
    assert answer.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")), answer
    return int(answer[9:12])


def lines_about_http(site: Site) -> list[str]:
    return [line for line in site.server.log if "http" in line and "live page" not in line]


@pytest.mark.parametrize("authenticates", [False, True])
def test_nothing_that_is_sent_is_logged_or_repeated(
    start_site: StartSite, secret_file: object, authenticates: bool
) -> None:
    flags = ("--auth-token-file", str(secret_file)) if authenticates else ()
    site = start_site(*flags)
    started = time.monotonic()
    for _ in range(20):
        for request in MALFORMED:
            answer = exchange(site, request.encode("latin-1"))
            assert 400 <= status_of(answer) <= 505
            assert status_of(answer) != 500
            assert MARK.lower().encode() not in answer.lower()
            assert b"Connection: close" in answer
            assert b"default-src 'none'" in answer
    for request in REFUSED:
        assert status_of(exchange(site, request.encode("latin-1"))) != 500
    assert site.ask("/healthz").status == 200
    site.server.wait_for_log("malformed request (400)")
    site.server.wait_for_log("malformed request (400) (")
    log = "\n".join(site.server.log)
    for trace in (MARK, MARK.upper(), ENCODED, "Traceback", 'File "'):
        assert trace not in log
    about = lines_about_http(site)
    assert all(" WARNING dflockd.http: " in line for line in about)
    # Seven kinds of refusal and one of a wrong token, a line a second for each.
    assert len(about) <= 8 * (time.monotonic() - started + 2)


def test_a_flood_of_one_kind_is_a_line_a_second(start_site: StartSite) -> None:
    site = start_site()
    started = time.monotonic()
    for _ in range(200):
        exchange(site, b"nonsense\r\n\r\n")
    first = site.server.wait_for_log("WARNING dflockd.http: ")
    assert first == "127.0.0.1: malformed request (400)"
    site.server.wait_for_log("malformed request (400) (")
    counts = [
        int(line.rpartition("(")[2].split(" ")[0])
        for line in site.server.log
        if line.endswith("times in the last second)")
    ]
    assert len(counts) <= time.monotonic() - started + 1
    assert sum(counts) <= 199


def test_a_secret_for_a_name_is_not_logged(closed_site: Site) -> None:
    holder = closed_site.server.connect()
    assert holder.ask("auth", "_", SECRET) == "ok"
    fence = int(holder.lock("twice")[:16], 16)
    path = f"/api/locks/twice?fence={fence}"
    assert closed_site.ask(path, "DELETE", basic(SECRET)).status == 200
    closed_site.server.wait_for_log(f"with fence {fence}")
    assert SECRET not in "\n".join(closed_site.server.log)


@pytest.fixture(scope="module")
def fuzzed(secret_file: object) -> Iterator[Site]:
    server = ServerProcess("--http-port", "0", "--auth-token-file", str(secret_file))
    site = Site(server, bearer())
    try:
        holder = server.connect()
        assert holder.ask("auth", "_", SECRET) == "ok"
        for key in ("a", "b" * 256, "\N{SNOWMAN}"):
            holder.lock(key, "0 3000")
        yield site
        assert site.ask("/healthz").status == 200
        log = "\n".join(server.log)
        assert "Traceback" not in log
        assert SECRET not in log
        assert "request failed" not in log
    finally:
        server.end()


WORDS = st.sampled_from(
    [
        *(
            "/",
            "//",
            "..",
            "%",
            "%2F",
            "%00",
            "%ff",
            "%ed%a0%80",
            "%0d%0a",
            "?",
            "&",
            "=",
            ";",
            "+",
        ),
        *("api", "/api/locks", "/api/lock", "/api/locks/a", "/api/stats", "/api/shards", "key=a"),
        *("search=", "sort=key", "sort=", "limit=500", "limit=-1", "limit=1e9", "offset=10000"),
        *("offset=99999999999999999999999", "fence=0", "fence=18446744073709551616", "space=lock"),
        *(
            "space=semaphore",
            "space=",
            "/metrics",
            "/healthz",
            "/readyz",
            "[",
            "]",
            "@",
            ":",
            "::1",
        ),
        *("http://", "\\", "'", "<script>", "~", "|", "^", "`", "{}", "é", "\udcff"),
    ]
)
TARGETS = st.lists(WORDS, max_size=8).map("".join).map(lambda text: f"/{text}")
NAMES = """
Origin Sec-Fetch-Site Sec-Fetch-Mode X-HTTP-Method-Override Connection Range If-None-Match
Accept-Encoding Upgrade X-Forwarded-For Content-Length
"""
VALUES = """
none null http://[ // same-origin cross-site navigate DELETE 0 \xff bytes=0- upgrade h2c close
keep-alive :: %00 gzip
"""
FIELDS = st.tuples(st.sampled_from(NAMES.split()), st.sampled_from(["", *VALUES.split()]))
METHODS = st.sampled_from(
    ["GET", "GET", "HEAD", "DELETE", "POST", "PUT", "OPTIONS", "PATCH", "TRACE"]
)
HOSTS = st.sampled_from(["127.0.0.1", "", "[::1]:80", "[", "a b", "x@y", "\xff", "..", "a:b", "[]"])


@given(METHODS, TARGETS, HOSTS, st.lists(FIELDS, max_size=4), st.sampled_from(["1.0", "1.1"]))
@settings(
    max_examples=400,
    phases=(Phase.explicit, Phase.generate),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_request_is_too_much(
    fuzzed: Site,
    site: Site,
    method: str,
    target: str,
    host: str,
    fields: list[tuple[str, str]],
    version: str,
) -> None:
    """Of all that can be put together, nothing makes a server fail."""
    more = "".join(f"{name}: {value}\r\n" for name, value in fields)
    for which, proof in ((fuzzed, f"Authorization: Bearer {SECRET}\r\n"), (site, "")):
        head = f"{method} {target} HTTP/{version}\r\nHost: {host}\r\n{proof}{more}\r\n"
        answer = exchange(which, head.encode(errors="surrogateescape"))
        assert status_of(answer) < 500 or status_of(answer) in (501, 503), (head, answer)
        assert b"default-src 'none'" in answer
        assert SECRET.encode() not in answer


async def test_a_fault_of_the_server_is_told_by_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with site_here() as here:

        async def fail() -> bytes:
            raise ValueError(MARK)

        monkeypatch.setattr(here.http._exposition, "text", fail)
        peer = await here.connect()
        ask = f"GET /metrics?{MARK} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
        assert [await peer.ask(ask) for _ in range(10)] == [500] * 10
        assert await peer.ask() == 200, "the connection goes on"
    (line,) = [record for record in caplog.records if "request failed" in record.getMessage()]
    assert line.levelname == "WARNING"
    assert "ValueError in " in line.getMessage()
    assert "test_faults.py:" in line.getMessage()
    assert MARK not in caplog.text
    assert "Traceback" not in caplog.text
