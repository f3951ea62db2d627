"""What tests of `lock_unique` share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.celery_dflock.processes import Cluster
from tests.celery_dflock.unique.support import Parked


@pytest.fixture
def parked(cluster: Cluster, key: str) -> Iterator[Parked]:
    queue = Parked(f"parked:{key}")
    yield queue
    queue.purge()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file that lets tasks go on; there at the end of the test in any case."""
    path = tmp_path / "gate"
    yield path
    path.touch()
