"""Servers with a state directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflockd.client.process import close_idle_connections
from tests.dflockd.client_support import Client, client_named
from tests.dflockd.storage.machine import Machine
from tests.dflockd.storage.recovery_support import Site


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    site = Site(tmp_path / "state", *getattr(request, "param", ()))
    try:
        site.start()
        yield site
    finally:
        site.end()
        close_idle_connections()


@pytest.fixture(params=["sync", "asyncio"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    with client_named(request.param) as client:
        yield client


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "state", monkeypatch)
