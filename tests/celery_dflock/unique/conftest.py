"""What tests of `lock_unique` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.celery_dflock.processes import Cluster
from tests.celery_dflock.unique.support import Parked


@pytest.fixture
def parked(cluster: Cluster, key: str) -> Iterator[Parked]:
    queue = Parked(f"parked:{key}")
    yield queue
    queue.purge()
