"""Lock servers with their HTTP side."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dflockd.http.http_site import SECRET, Site, StartSite, bearer
from tests.dflockd.raw_server import ServerProcess, eventually


@pytest.fixture
def start_site() -> Iterator[StartSite]:
    """Start servers with given flags; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str, headers: dict[str, str] | None = None, **options: Any) -> Site:
            server = ServerProcess("--http-port", "0", *flags, **options)
            stack.callback(server.end)
            return Site(server, headers)

        yield start


@pytest.fixture
def site(_open_site: Site) -> Iterator[Site]:
    """A server that the tests of a module share: they use different keys. Its clients end with each."""
    yield _open_site
    _hang_up(_open_site)


@pytest.fixture(scope="module")
def _open_site() -> Iterator[Site]:
    server = ServerProcess("--http-port", "0")
    try:
        yield Site(server)
    finally:
        server.end()


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "token"
    path.write_text(SECRET + "\n")
    return path


@pytest.fixture
def closed_site(_site_with_secret: Site) -> Iterator[Site]:
    """The same, of a server with a secret, asked by somebody who knows it."""
    yield _site_with_secret
    _hang_up(_site_with_secret)


@pytest.fixture(scope="module")
def _site_with_secret(secret_file: Path) -> Iterator[Site]:
    server = ServerProcess("--http-port", "0", "--auth-token-file", str(secret_file))
    try:
        yield Site(server, bearer())
    finally:
        server.end()


def _hang_up(site: Site) -> None:
    site.server.hang_up()
    eventually(lambda: site.json("/api/stats")["connections"] == 0)
