"""A cluster whose servers are scripted, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.dflockd.client.cluster.support import KEY, Make
from tests.dflockd.client_support import Client
from tests.dflockd.scripted_server import ScriptedCluster


@pytest.fixture
def cluster() -> Iterator[ScriptedCluster]:
    """Two servers; the first has all shards."""
    cluster = ScriptedCluster()
    yield cluster
    cluster.stop()


@pytest.fixture
def make(client: Client, cluster: ScriptedCluster) -> Make:
    def make(key: str = KEY, **options: Any) -> Any:
        return client.lock(key, servers=cluster.seeds, **{"acquire_timeout_s": 5, **options})

    return make
