"""Lock servers with their HTTP side."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dflockd.http.http_site import SECRET, Site, StartSite, bearer
from tests.dflockd.raw_server import ServerProcess


@pytest.fixture
def start_site() -> Iterator[StartSite]:
    """Start servers with given flags; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str, headers: dict[str, str] | None = None, **options: Any) -> Site:
            server = ServerProcess("--http-port", "0", *flags, **options)
            stack.callback(server.end)
            return Site(server, headers)

        yield start


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A server that the tests of a module share: they use different keys."""
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


@pytest.fixture(scope="module")
def closed_site(secret_file: Path) -> Iterator[Site]:
    """The same, of a server with a secret, asked by somebody who knows it."""
    server = ServerProcess("--http-port", "0", "--auth-token-file", str(secret_file))
    try:
        yield Site(server, bearer())
    finally:
        server.end()
