"""A cluster of real servers, for the tests of a file; and silence for simulated ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.dflockd.cluster.holders import Holder, start_cluster
from tests.dflockd.cluster.stage import ClusterStage
from tests.dflockd.shards.etcd_process import Etcd
from tests.pace import Pace


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as process:
        yield process


@pytest.fixture(scope="module")
def stage(etcd: Etcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterStage]:
    """Three servers that share a few shards."""
    with start_cluster(tmp_path_factory.mktemp("cluster"), etcd) as stage, Pace() as Holder.pace:
        stage.wait_settled()
        yield stage


@pytest.fixture
def cluster(stage: ClusterStage) -> ClusterStage:
    """The same with all of its servers."""
    stage.start()
    stage.wait_settled()
    return stage


@pytest.fixture
def quiet() -> Iterator[None]:
    """The story is told by the simulation; the log of a thousand crashes says nothing more."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
