"""The cells of the table of outcomes that prefork has on RabbitMQ: they are as on Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.demo.stage import LockServer
from tests.celery_dflock.outcome.table.expected import check, find
from tests.celery_dflock.outcome.table.side import BROKERS, Side
from tests.celery_dflock.outcome.table.trials import OUTCOMES
from tests.celery_dflock.processes import Cluster
from tests.celery_dflock.rabbitmq.bus import Bus
from tests.rabbitmq import RabbitMQ


@pytest.fixture(scope="module", params=BROKERS.values())
def side(request: pytest.FixtureRequest, rabbitmq: RabbitMQ, cluster: Cluster) -> Iterator[Side]:
    with (
        LockServer(cluster.directory, name=f"outcomes-{request.param}") as server,
        Bus(rabbitmq, cluster, f"outcomes-{request.param}", request.param) as bus,
    ):
        side = Side("prefork", cluster, server, bus)
        yield side
        side.stop()


@pytest.mark.soak
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_outcome(side: Side, outcome: str) -> None:
    check(outcome, "prefork", find(outcome, side))
