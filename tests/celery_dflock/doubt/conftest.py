"""A lock whose connection breaks is in doubt: nothing happens before it is held again, or lost.

With a state directory the lock server remembers it; without one somebody else may have it at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery

from examples.demo.stage import LockServer


@pytest.fixture(scope="module", params=["remembers", "forgets"])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[LockServer]:
    name = f"doubt-{request.param}"
    directory = tmp_path_factory.mktemp(name)
    options = ["--state-dir", str(directory / "state")] if request.param == "remembers" else []
    with LockServer(directory, *options, name=name) as server:
        yield server


@pytest.fixture(autouse=True)
def running(server: LockServer) -> Iterator[None]:
    """Leave the server to the next test as it was."""
    yield
    if not server.running:
        server.start()


@pytest.fixture
def app(server: LockServer) -> Celery:
    app = Celery("doubt", set_as_current=False)
    app.conf.update(
        dflock_servers=[server.address],
        task_always_eager=True,
        task_eager_propagates=True,
        task_store_eager_result=False,
    )
    return app
