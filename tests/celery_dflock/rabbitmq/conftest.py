"""A RabbitMQ that the tests of this directory share, and a queue for each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests import rabbitmq as package
from tests.celery_dflock.processes import Cluster
from tests.celery_dflock.rabbitmq.bus import Bus
from tests.rabbitmq import RabbitMQ

_numbers = itertools.count()


@pytest.fixture(scope="session")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    why = package.missing()
    if why:
        pytest.skip(why)
    directory: Path = tmp_path_factory.mktemp("rabbitmq")
    with RabbitMQ(directory) as broker:
        yield broker


@pytest.fixture
def make_bus(rabbitmq: RabbitMQ, cluster: Cluster) -> Iterator[Callable[..., Bus]]:
    """Make queues that end with the test."""
    with ExitStack() as made:

        def make(kind: str, **arguments: Any) -> Bus:
            name = f"{kind}{next(_numbers)}"
            return made.enter_context(Bus(rabbitmq, cluster, name, kind, **arguments))

        yield make


@pytest.fixture(params=["classic", "quorum"])
def bus(request: pytest.FixtureRequest, make_bus: Callable[..., Bus]) -> Bus:
    return make_bus(request.param)
