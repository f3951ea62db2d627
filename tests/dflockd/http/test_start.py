"""Starting with the HTTP side and without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import forkserver
from tests.dflockd.http.http_site import Site, StartSite
from tests.dflockd.raw_server import PATIENCE, ServerProcess, StartServer

WITHOUT_EXTRA = (
    "import sys; sys.modules['h11'] = None; from dflockd.cli import main; sys.exit(main())"
)


def run(*flags: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-m", "dflockd"] if code is None else ["-c", code]
    return forkserver.run(
        [sys.executable, *start, "--host", "127.0.0.1", "--port", "0", *flags], timeout=PATIENCE
    )


def test_without_its_port_there_is_no_http(start: StartServer) -> None:
    server = start()
    assert server.connect().ask("ping") == "ok"
    assert "live page" not in "\n".join(server.log)


def test_without_the_extra_the_port_is_refused() -> None:
    done = run("--http-port", "0", code=WITHOUT_EXTRA)
    assert done.returncode == 2
    assert done.stderr == (
        "dflockd: --http-port needs h11, which is not installed: pip install 'dflockd-py[http]'\n"
    )


def test_without_the_extra_the_server_starts_as_ever() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_EXTRA, "--host", "127.0.0.1", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert any("listening on 127.0.0.1:" in process.stderr.readline() for _ in range(5))
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def test_clients_do_not_need_it() -> None:
    code = (
        "import sys, dflockd.client, dflockd.sync_client, dflockd.admin, dflockd.cli, celery_dflock\n"
        "found = {'h11', 'prometheus_client', 'dflockd.http'} & set(sys.modules)\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_port_that_is_taken(site: Site) -> None:
    port = site.url.rstrip("/").rpartition(":")[2]
    done = run("--http-port", port)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: " in done.stderr
    assert "choose another --http-host or --http-port" in done.stderr


@pytest.mark.parametrize("value", ["-1", "65536", "http", ""])
def test_a_bad_port(value: str) -> None:
    done = run("--http-port", value)
    assert done.returncode == 2
    assert f"--http-port: {value!r} is not a whole number from 0 to 65535" in done.stderr


def test_its_variables(start: StartServer) -> None:
    server = start(env={"DFLOCKD_HTTP_PORT": "0", "DFLOCKD_HTTP_HOST": "localhost"})
    assert Site(server).ask("/healthz").status == 200


def test_an_open_address_without_a_token_is_warned_of(start_site: StartSite) -> None:
    site = start_site("--http-host", "0.0.0.0")
    assert site.url.startswith("http://0.0.0.0:")
    warnings = [line for line in site.server.log if "WARNING" in line]
    assert len(warnings) == 1
    assert (
        "anyone who can reach 0.0.0.0 can see who holds which lock: set --auth-token-file"
        in warnings[0]
    )


def test_loopback_is_not_warned_of(start_site: StartSite) -> None:
    assert not [line for line in start_site().server.log if "WARNING" in line]


def test_the_page_is_there_while_it_serves_locks(start: StartServer) -> None:
    server: ServerProcess = start("--http-port", "0")
    site = Site(server)
    assert server.connect().lock("a")
    page = site.ask("/")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "<title>dflockd</title>" in page.body
    for name, kind in (("page.js", "javascript"), ("page.css", "css"), ("icon.svg", "svg")):
        assert kind in site.ask(f"/{name}").headers["Content-Type"]
