"""Who gets in, and what browsers may be led to do."""

from __future__ import annotations

import base64
import re
import socket
import ssl
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import h11
import pytest

from dflockd.files import not_after
from dflockd.http.guard import _authenticated
from dflockd.http.head import HttpRequest
from tests.dflockd.http.http_site import SECRET, Site, StartSite, basic, bearer
from tests.dflockd.raw_server import PATIENCE
from tests.dflockd.server.conftest import make_certificates

CLOSED = [
    "/",
    "/page.js",
    "/page.css",
    "/theme.js",
    "/icon.svg",
    "/metrics",
    "/api/stats",
    "/api/locks",
    "/api/locks/key",
    "/api/lock?key=key",
    "/api/shards",
    "/no/such/path",
]


@pytest.mark.parametrize("path", CLOSED)
def test_without_the_token_there_is_nothing_to_see(closed_site: Site, path: str) -> None:
    for wrong in ({}, bearer("wrong"), basic("ann", "wrong"), {"Authorization": SECRET}):
        answer = closed_site.ask(path, headers={"Authorization": "", **wrong})
        assert answer.status == 401, wrong
        assert answer.headers["WWW-Authenticate"] == 'Basic realm="dflockd", charset="UTF-8"'
        assert answer.body.startswith("401: the auth token is needed")
    missing = path in ("/no/such/path", "/api/shards")
    assert closed_site.ask(path).status == (404 if missing else 200)


def test_health_needs_no_token(closed_site: Site) -> None:
    for path in ("/healthz", "/readyz"):
        assert closed_site.ask(path, headers={"Authorization": ""}).status == 200


def test_the_list_of_what_is_closed_is_whole(closed_site: Site) -> None:
    """Every file of the page is in it."""
    import dflockd.http

    page = Path(dflockd.http.__file__).parent / "page"
    files = {"/" if file.name == "index.html" else f"/{file.name}" for file in page.iterdir()}
    assert files <= set(CLOSED)


@pytest.mark.parametrize(
    "value",
    [
        "Basic",
        "Basic !!!",
        "Basic " + base64.b64encode(b"no colon").decode(),
        "Basic " + base64.b64encode(b"\xff\xfe:\xff").decode(),
        "Bearer",
        "Digest x",
        f"Bearer {SECRET}x",
        "Bearer \xff",
    ],
)
def test_malformed_credentials_are_refused(closed_site: Site, value: str) -> None:
    assert closed_site.ask("/api/stats", headers={"Authorization": value}).status == 401


def test_both_ways_to_say_the_token(closed_site: Site) -> None:
    for headers in (bearer(), basic("ann"), basic(""), {"Authorization": f"bearer {SECRET}"}):
        assert closed_site.ask("/api/stats", headers=headers).status == 200


@pytest.mark.parametrize("secret", ["with:colon", "\N{SNOWMAN} and space"])
def test_secrets_of_any_text(start_site: StartSite, tmp_path: Path, secret: str) -> None:
    (tmp_path / "token").write_text(secret)
    site = start_site("--auth-token-file", str(tmp_path / "token"))
    assert site.ask("/api/stats", headers=basic("ann", secret)).status == 200


def test_a_wrong_token_is_logged_without_it(closed_site: Site) -> None:
    closed_site.ask("/api/locks/x%0aforged", headers=bearer("wrong guess"))
    closed_site.server.wait_for_log("WARNING dflockd.http: 127.0.0.1: wrong auth token")
    log = "\n".join(closed_site.server.log)
    assert "wrong guess" not in log
    assert "forged" not in log, "a path can have a secret in it, too"


def test_how_long_a_wrong_token_takes_does_not_tell_of_the_right_one() -> None:
    secret = b"a" * 30 + b"b" + b"a" * 30

    def seconds(name: str) -> float:
        """The time that the thread itself had."""
        headers = {"authorization": basic(name, "wrong")["Authorization"]}
        request = HttpRequest("GET", "/metrics", {}, headers, h11.Connection(h11.SERVER))
        before = time.thread_time()
        assert _authenticated(request, secret) is None
        return time.thread_time() - before

    alike, other = (min(seconds(letter * 23_000) for _ in range(50)) for letter in "az")
    assert alike < 2 * other


@pytest.mark.parametrize(
    "host", ["127.0.0.1:80", "localhost", "[::1]:9", "dflockd", "10.0.0.7", "x.localhost"]
)
def test_names_of_ones_own(site: Site, host: str) -> None:
    assert site.ask("/api/stats", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *("rebound.example", "127.0.0.1.nip.io", "localhost.evil.example", "a.b:80", "[x"),
        *(
            "evil.example.",
            "evil.example@127.0.0.1",
            "127.0.0.1#.evil.example",
            "evil.example/",
            "::1",
        ),
        *(
            "127.0.0.1, evil.example",
            "127.0.0.1:80:80",
            "127.0.0.1:x",
            "[::1",
            "[::1].evil.example",
        ),
    ],
)
def test_a_name_that_others_own_leads_nowhere(site: Site, host: str) -> None:
    """A page of that name would have the rights of this server's own (DNS rebinding)."""
    for path in ("/", "/api/locks", "/metrics"):
        status = site.ask(path, headers={"Host": host}).status
        assert status in (400, 421), f"{path} was shown to a page of {host}"
    assert site.ask("/healthz", headers={"Host": host}).status == 200


def test_behind_a_token_any_name_will_do(closed_site: Site) -> None:
    assert closed_site.ask("/api/stats", headers={"Host": "locks.example.com"}).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
    ],
)
def test_a_page_of_another_site_changes_nothing(closed_site: Site, headers: dict[str, str]) -> None:
    holder = closed_site.server.connect()
    holder.ask("auth", "_", SECRET)
    token = holder.lock("theirs")
    path = f"/api/locks/theirs?fence={int(token[:16], 16)}"
    assert closed_site.ask(path, "DELETE", headers).status == 403
    assert holder.ask("r", "theirs", token) == "ok"


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://[", "Sec-Fetch-Mode": "cors"},
    ],
)
def test_a_page_of_another_site_asks_nothing_in_the_background(
    site: Site, headers: dict[str, str]
) -> None:
    """It could not read the answer, but see how long it takes, and keep the server busy."""
    for path in ("/api/locks?search=a", "/api/stats", "/metrics", "/%61pi/locks"):
        assert site.ask(path, headers=headers).status == 403
    assert site.ask("/api/stats", headers={**headers, "Sec-Fetch-Mode": "navigate"}).status == 200
    own = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
    assert site.ask("/api/stats", headers=own).status == 200
    assert site.ask("/healthz", headers=headers).status == 200


def test_an_origin_that_is_none_changes_nothing(closed_site: Site) -> None:
    path = "/api/locks/x?fence=1"
    assert closed_site.ask(path, "DELETE", {"Origin": "http://["}).status == 403
    assert closed_site.ask(path, "DELETE", {"Sec-Fetch-Site": "none"}).status == 409
    other = {"X-HTTP-Method-Override": "DELETE"}
    assert closed_site.ask(path, "GET", other).json["holders"] == []
    assert closed_site.ask(path, "POST", other).status == 405


def test_forms_change_nothing(closed_site: Site) -> None:
    for method in ("POST", "PUT", "PATCH"):
        assert closed_site.ask("/api/locks/x?fence=1", method).status == 405


@pytest.mark.parametrize("path", ["/", "/api/stats", "/metrics", "/nowhere", "/healthz"])
def test_what_browsers_are_told(site: Site, closed_site: Site, path: str) -> None:
    for answer in (site.ask(path), closed_site.ask(path, headers={"Authorization": ""})):
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Server"] == "dflockd"
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert "Set-Cookie" not in answer.headers


def test_the_page_stands_alone() -> None:
    """It works where there is no internet, and its policy allows nothing inline."""
    import dflockd.http

    page = Path(dflockd.http.__file__).parent / "page"
    for file in page.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|@import|innerHTML|outerHTML|AdjacentHTML|eval\(", text), file
        assert not re.search(r"<style|<script>|<[^>]+\s(style|on\w+)=", text), file


def test_it_is_https_where_the_wire_is_tls(start_site: StartSite, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    cert, key, ca = (str(tmp_path / name) for name in ("server.pem", "server.key", "ca.pem"))
    site = start_site("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca)
    assert site.url.startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(tmp_path / "client.pem", tmp_path / "client.key")

    def expiry() -> dict[str, float]:
        with urllib.request.urlopen(site.url + "metrics", context=context, timeout=15) as answer:
            metrics = answer.read().decode()
        name = "dflockd_certificate_expiry_timestamp_seconds"
        found = re.findall(rf'^{name}{{setting="(.+)"}} (.+)$', metrics, re.MULTILINE)
        return {setting: float(value) for setting, value in found}

    until = not_after(cert)
    assert expiry() == {"tls-cert": until, "tls-client-ca": not_after(ca)}
    assert until > 0
    (tmp_path / "server.pem").write_text("")
    assert expiry()["tls-cert"] == until, "it shows the one from before"


def test_a_request_that_names_no_host(site: Site) -> None:
    """No browser sends one; probes of old do."""
    where = urlsplit(site.url)
    with socket.create_connection((where.hostname, where.port), PATIENCE) as connection:
        connection.sendall(b"GET /api/stats HTTP/1.0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
