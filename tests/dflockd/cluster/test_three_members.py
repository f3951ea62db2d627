"""An etcd of three members: what happens to one of them costs no server its serving lease."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from dflockd.shards import StoreUnreachableError
from examples.demo.stage import wait_until
from tests.dflockd.cluster.stage import ClusterStage, FewShards, Mapping
from tests.dflockd.raw_server import PATIENCE, granted
from tests.dflockd.shards.etcd_cluster import EtcdCluster, EtcdMember

SERVING_LEASE = 10
"""As by default. On a busy machine an election takes seconds of it."""
LEASE = 30

SERVERS = 3

LAPSED = "no lock is granted or renewed until it does"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("members")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterStage]:
    directory = tmp_path_factory.mktemp("servers")
    args = ("--default-lease-ttl", str(LEASE))
    with ClusterStage(
        directory, etcd, *args, serving_lease=SERVING_LEASE, max_lease=LEASE, kind=FewShards
    ) as stage:
        stage.wait_settled()
        yield stage


class Lives:
    """The signs of life of all servers, as the members that are left tell of them."""

    def __init__(self, etcd: EtcdCluster, without: EtcdMember) -> None:
        left = ",".join(m.endpoint for m in etcd.members if m is not without)
        self._mapping = Mapping(lambda: left)
        self._before: dict[str, int] = {}

    def wait(self, number: int = 0) -> None:
        """Wait until each server has given so many of them."""
        seen: dict[str, set[int]] = {}

        def probe() -> bool | None:
            with contextlib.suppress(StoreUnreachableError):  # they may be electing a leader
                for address, record in self._mapping._load("nodes").items():
                    seen.setdefault(address, set()).add(record.revision)
            enough = [len(revisions) > number for revisions in seen.values()]
            return (len(enough) == SERVERS and all(enough)) or None

        wait_until(probe, 4 * PATIENCE, lambda: f"no signs of life: {seen}")


@pytest.mark.parametrize(
    ("how", "index", "lives"),
    [
        ("silent", 0, 1),  # whoever asks it has found another one
        *(
            pytest.param(how, index, 4, marks=pytest.mark.soak)  # and keeps to that
            for how in ("silent", "killed")
            for index in range(3)
        ),
    ],
)
def test_a_member_is_lost_and_comes_back(
    cluster: ClusterStage, etcd: EtcdCluster, how: str, index: int, lives: int
) -> None:
    # One of the three leads, and each server asks one of them.
    member = etcd.members[index]
    key = cluster.key_at(cluster.servers[index])
    client, line = cluster.follow("l", key, f"0 {LEASE}")
    token = granted(line)
    assert client is not None
    lapses = [server.log_text().count(LAPSED) for server in cluster.servers]
    others = Lives(etcd, member)
    with _lost(member, how):
        others.wait(lives)
        assert client.ask("n", key, token) == f"ok {LEASE}"
    assert client.ask("r", key, token) == "ok"
    assert [server.log_text().count(LAPSED) for server in cluster.servers] == lapses
    Lives(etcd, member).wait()
    for server in cluster.servers:
        assert "was taken for dead" not in server.log_text()


@contextlib.contextmanager
def _lost(member: EtcdMember, how: str) -> Iterator[None]:
    if how == "silent":
        member.pause()
        try:
            yield
        finally:
            member.resume()
    else:
        member.kill()
        try:
            yield
        finally:
            member.start()
