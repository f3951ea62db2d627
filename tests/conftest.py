"""The containers have a suite of their own: `make smoke`."""

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from examples.demo.stage import Process, StageError, redis_executable
from tests import forkserver

# No example is judged by the clock of a busy machine. The soak tries many.
settings.register_profile("celery_dflock", deadline=None, max_examples=50)
settings.register_profile("soak", deadline=None, max_examples=1000)
settings.load_profile("celery_dflock")

collect_ignore = ["smoke"]

Process.launch = staticmethod(forkserver.start)

LONGEST = (
    "rabbitmq/",
    "published/test_published_servers.py",
    "worker/test_consumer_wait_faults.py",
    "test_benchmarks.py",
    "test_testing.py",
    "top/test_command.py",
    "page/test_page.py",
    "beat/test_inner.py",
    "beat/test_beats.py",
    "cluster/test_newcomer.py",
    "test_lock_cluster.py",
    "doubt/test_in_tasks.py",
    "test_docs.py",
    "worker/test_shutdown.py",
    "worker/test_pools.py",
    "worker/test_consumer_wait.py",
    "worker/test_mixtures.py",
    "published/test_published_clients.py",
    "cluster/test_simulation.py",
    "table/test_as_the_model.py",
)
"""The files that take longest. Each goes to one process, in which the others then find less to do."""


def take_shared_tasks() -> list[Any]:
    """Return what makes tasks for every app that comes later, but for Celery's own, and forget it."""
    state = sys.modules.get("celery._state")
    made: set[Any] = state._on_app_finalizers if state is not None else set()
    found = [each for each in made if each.__module__ == "celery.app.base"]
    made.difference_update(found)
    return found


@pytest.fixture(autouse=True)
def no_shared_tasks() -> Iterator[None]:
    """A task of a test is of its app alone: a bad one has every app that comes later refused."""
    yield
    assert take_shared_tasks() == [], "give the tasks of this test shared=False"


@pytest.fixture(scope="session")
def needs_redis() -> None:
    """Skip what needs a Redis, where there is none."""
    try:
        redis_executable()
    except StageError as error:
        pytest.skip(str(error))


# What is imported and collected stays to the end, 300,000 objects: a third of a second for each full
# collection that looks at them.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest, so that no process is left alone with one at the end."""

    def rank(item: pytest.Item) -> int:
        path = f"/{item.path.as_posix()}"
        return next((n for n, end in enumerate(LONGEST) if f"/{end}" in path), len(LONGEST))

    items.sort(key=rank)


class OneBroker(LoadFileScheduling):
    """Each file goes to one process, and all that need RabbitMQ to the same: it takes long to start."""

    def _split_scope(self, nodeid: str) -> str:
        return "rabbitmq" if "/rabbitmq/" in nodeid else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneBroker:
    return OneBroker(config, log)
