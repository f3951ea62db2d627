"""The two stores, so that the same tests judge both."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from dflockd.shards import MemoryStore, Store
from dflockd.shards.etcd import EtcdStore
from tests.dflockd.shards.etcd_process import Etcd

_prefixes = itertools.count()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """An etcd that all tests of a process share, and leave running."""
    with Etcd(tmp_path_factory.mktemp("etcd")) as process:
        yield process


@pytest.fixture
async def etcd_store(etcd: Etcd) -> AsyncIterator[EtcdStore]:
    store = EtcdStore([etcd.endpoint], timeout=10)
    yield store
    await store.close()


@pytest.fixture(params=["memory", "etcd"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    etcd = request.getfixturevalue("etcd")
    store = EtcdStore([etcd.endpoint], timeout=10)
    yield store
    await store.close()


@pytest.fixture
def prefix() -> str:
    """A prefix that no other test uses."""
    return f"/test-{next(_prefixes)}"
