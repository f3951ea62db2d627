"""Real processes: one Redis, one lock server and two workers that the tests share.

Tests use keys of their own. Those that kill a server or a worker start their own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery._state import _set_task_join_will_block

from examples.demo.stage import LockServer, Redis, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import Cluster, Waiter
from tests.celery_dflock.record import RECORD


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stage")


@pytest.fixture(scope="session")
def redis_url(needs_redis: None, directory: Path) -> Iterator[str]:
    with Redis(directory) as redis:
        yield redis.url


@pytest.fixture(scope="session")
def lock_server(directory: Path) -> Iterator[LockServer]:
    with LockServer(directory) as server:
        yield server


@pytest.fixture(scope="session")
def cluster(directory: Path, redis_url: str, lock_server: LockServer) -> Iterator[Cluster]:
    """What the tests send tasks with and ask about them; itself without workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(jobs.BROKER, redis_url)
        patch.setenv(RECORD, str(directory / "record.jsonl"))
        patch.setenv("DFLOCK_SERVERS", lock_server.address)
        jobs.configure({jobs.BROKER: redis_url})
        yield Cluster(directory, lock_server)
        # Results that a failed test has kept would unsubscribe at a Redis that is gone.
        consumer = jobs.app.backend.result_consumer
        consumer.stop()
        consumer.cancel_for = lambda _task_id: None
        jobs.app.close()


@pytest.fixture(scope="session")
def workers(cluster: Cluster) -> Iterator[tuple[Worker, Worker]]:
    """Two workers of two processes each; beside the common queue each has one with its name."""
    with contextlib.ExitStack() as running:
        one, two = (
            running.enter_context(cluster.worker(name, queues=f"celery,{name}"))
            for name in ("one", "two")
        )
        cluster.wait_ready(one, two)
        yield one, two


@pytest.fixture
def app(lock_server: LockServer) -> Celery:
    """An app whose tasks run in this process."""
    app = Celery("eager", set_as_current=False)
    app.conf.task_always_eager = True
    app.conf.task_eager_propagates = True
    app.conf.dflock_servers = [lock_server.address]
    return app


@pytest.fixture
def eager_in_threads() -> Iterator[None]:
    """Celery notes in one variable for all threads that a task runs, and so forgets to undo it."""
    yield
    _set_task_join_will_block(False)


_keys = itertools.count()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A lock that no other test uses."""
    return f"{request.node.originalname}:{next(_keys)}"


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file that lets tasks go on. It is there in the end however the test ends.

    A task that goes on waiting has a process of a worker that the tests after this one share.
    """
    path = tmp_path / "gate"
    yield path
    path.touch()


@pytest.fixture
def never(tmp_path: Path) -> Iterator[str]:
    """The gate of a task that the test wants to be interrupted."""
    path = tmp_path / "never"
    yield str(path)
    path.touch()


@pytest.fixture
def waiter(cluster: Cluster) -> Iterator[Callable[..., Waiter]]:
    """Make waiters for a lock outside of tasks; they end with the test."""
    with contextlib.ExitStack() as running:

        def wait(key: str, **options: Any) -> Waiter:
            return running.enter_context(Waiter(cluster.lock(key, **options)))

        yield wait
