"""Three real servers over a real etcd: how they share the shards, and keep the locks."""

from __future__ import annotations

import json
import math
import re
import shlex
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dflockd.shards import get_shard_id
from dflockd.wire import Report, decode_map
from examples.demo.stage import wait_until
from tests.dflockd.cluster.stage import ClusterServer, ClusterStage, free_port
from tests.dflockd.cluster.test_replaced_store import readiness
from tests.dflockd.raw_server import PATIENCE, RawClient, granted
from tests.dflockd.shards.etcd_process import Etcd
from tests.pace import Pace

SERVING_LEASE = 2
LEASE = 9
"""Long enough for a shard whose server has crashed to get another one meanwhile."""

TIMES = ("--default-lease-ttl", str(LEASE))

LAPSED = "no lock is granted or renewed until it does"
"""The line with which a server says that its serving lease has ended."""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as process:
        yield process


@pytest.fixture(scope="module")
def stage(etcd: Etcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterStage]:
    directory = tmp_path_factory.mktemp("cluster")
    with ClusterStage(
        directory, etcd, *TIMES, serving_lease=SERVING_LEASE, max_lease=LEASE
    ) as stage:
        stage.wait_settled()
        yield stage


@pytest.fixture(scope="module")
def beginning(stage: ClusterStage) -> dict[int, bytes]:
    """What etcd has of the shards before any of them has moved."""
    values = stage.mapping.values()
    stage.mapping.rebalance()
    stage.wait_settled()
    return values


@pytest.fixture
def cluster(stage: ClusterStage, beginning: dict[int, bytes]) -> ClusterStage:
    """The cluster with all of its servers."""
    stage.start()
    stage.wait_settled()
    return stage


@pytest.fixture(scope="module", autouse=True)
def pace() -> Iterator[Pace]:
    with Pace() as Holder.pace:
        yield Holder.pace


class Holder:
    """Who holds a lock, with the protocol alone: renews it, wherever its shard goes."""

    pace: Pace

    def __init__(self, cluster: ClusterStage, key: str) -> None:
        self._cluster = cluster
        self.key = key
        self.lease_ends(self._after(PATIENCE + LEASE))
        self._client: RawClient | None
        self._client, line = cluster.follow("l", key, f"0 {LEASE}")
        self.token = granted(line)
        assert self._client is not None
        host, port = self._client.sock.getpeername()
        self.server = cluster.at(f"{host}:{port}")
        self.keep()

    def _after(self, seconds: float = LEASE) -> tuple[float, float]:
        """A time, and how long this process will have been served then: that is later."""
        return time.monotonic() + seconds, self.pace.seconds + seconds

    def lease_ends(self, times: tuple[float, float] | None = None) -> None:
        self.deadline, self._served_until = times or self._after()

    def renew(self) -> str:
        """Ask once; the status of the answer, empty if there was none."""
        ends = self._after()
        try:
            if self._client is None:
                self._client = self._cluster.connect(self.server)
            line = self._client.ask("n", self.key, f"{self.token} {LEASE}")
        except OSError:
            line = ""
        status, *fields = line.split() or [""]
        if status == "ok":
            self.lease_ends(ends)
        elif status == "error_moved":
            self.go_to(self._cluster.at(fields[2]))
        elif not status:
            self.go_to(self._cluster.any)
        return status

    def go_to(self, server: ClusterServer) -> None:
        """Ask there from now on."""
        self.server, self._client = server, None

    def keep(self) -> None:
        """Renew, and again until that is answered."""
        wait_until(lambda: self.try_to_keep() == "ok" or None, PATIENCE, lambda: self.key)

    def try_to_keep(self) -> str:
        """Renew; nothing must have come in between."""
        asked_at = time.monotonic()
        status = self.renew()
        if status == "error":
            assert asked_at >= self.deadline, f"{self.key} was lost"
        in_time = self.pace.seconds < self._served_until
        assert in_time, f"the lease of {self.key} has ended: {status!r}"
        if status == "error":
            pytest.skip("the machine is too slow to keep a lock")
        return status

    def release(self) -> str:
        assert self._client is not None
        return self._client.ask("r", self.key, self.token)


def ask_once(cluster: ClusterStage, key: str) -> str:
    """The status of an attempt to get a lock without waiting; empty if nobody answered."""
    return cluster.follow("l", key, f"0 {LEASE}", timeout=0)[1].partition(" ")[0]


def fence(token: str) -> int:
    return int(token[:16], 16)


# How the shards are shared.


def test_three_servers_share_the_shards_round_robin(
    stage: ClusterStage, beginning: dict[int, bytes]
) -> None:
    owners = {shard: _read(value)[1] for shard, value in beginning.items()}
    # Who was not there within the time that is waited for others has none, on a busy machine.
    present = sorted(set(owners.values()))
    assert set(present) <= {server.address for server in stage.servers}
    for number, owner in enumerate(present):
        mine = [shard for shard in sorted(owners) if owners[shard] == owner]
        assert mine == list(range(number, 8192, len(present)))


def test_what_is_in_etcd_has_the_documented_format(
    stage: ClusterStage, beginning: dict[int, bytes]
) -> None:
    assert sorted(beginning) == list(range(8192))
    addresses = {server.address for server in stage.servers}
    for value in beginning.values():
        target, current, flags = _read(value)
        assert target == current
        assert target in addresses
        assert re.fullmatch(r"[^,]+,[^,]*(,f=[^,]+)*", value.decode())
        assert [flag.partition(":")[0] for flag in flags] == ["e"]


def _read(value: bytes) -> tuple[str, str, list[str]]:
    """Target, current and flags, as the format is described."""
    parts = [part.strip() for part in value.decode().split(",")]
    flags = [part.removeprefix("f=") for part in parts if part.startswith("f=")]
    target, current = [part for part in parts if not part.startswith("f=")]
    return target, current, flags


def wait_known(cluster: ClusterStage) -> dict[str, Any]:
    """Wait until all servers say of the shards what etcd says, and return that."""
    records = cluster.mapping.records()
    wanted = [(records[shard].current, records[shard].epoch) for shard in range(8192)]

    def probe() -> dict[str, Any] | None:
        for server in cluster.servers:
            report = server.report()
            assert report["num_shards"] == 8192
            owners = [report["servers"][number] for number in report["shards"]]
            if list(zip(owners, report["epochs"], strict=True)) != wanted:
                return None
        return report

    return wait_until(probe, PATIENCE, lambda: "they do not agree")


def test_every_server_knows_where_all_shards_are(cluster: ClusterStage) -> None:
    wait_known(cluster)


def test_who_has_the_map_is_not_sent_it_again(cluster: ClusterStage) -> None:
    """Whoever sent it: a map has one version."""
    report = wait_known(cluster)
    version = report["version"]
    for client in map(cluster.connect, cluster.servers):
        assert client.ask("shards", "_", version) == "ok"
        assert client.ask("shards", "_", f"{version} zlib") == "ok"
        for unknown in ("_", "", "x", f"x{version}", "at all", f"{version[:-1]} zlib zlib"):
            assert json.loads(client.ask("shards", "_", unknown).removeprefix("ok ")) == report
        status, _, packed = client.ask("shards", "_", "_ zlib").partition(" ")
        assert status == "ok"
        assert len(packed) < len(json.dumps(report)) / 4
        document, known = decode_map(Report(packed.encode()))
        assert {**document, "version": known.decode()} == report


def test_who_has_the_map_of_before_is_sent_the_new_one(cluster: ClusterStage) -> None:
    here, there, _ = cluster.servers
    shard = get_shard_id(cluster.key_at(here))
    version = wait_known(cluster)["version"]
    cluster.move([shard], there)
    assert wait_known(cluster)["version"] != version
    assert cluster.connect(here).ask("shards", "_", version).startswith("ok {")


# How locks move.


def test_a_lock_goes_with_its_shard(cluster: ClusterStage) -> None:
    there, here, _ = cluster.servers
    holder = Holder(cluster, cluster.key_at(there))
    cluster.move([get_shard_id(holder.key)], here)
    assert holder.renew() in ("error_moved", "")
    assert ask_once(cluster, holder.key) == "timeout"
    holder.go_to(here)
    assert holder.renew() == "ok"
    assert holder.release() == "ok"
    _, line = cluster.follow("l", holder.key, f"0 {LEASE}")
    assert fence(granted(line)) > fence(holder.token)


def test_a_drained_server_hands_over_holders_and_waiters_in_their_order(
    cluster: ClusterStage,
) -> None:
    leaving = cluster.servers[0]
    holder = Holder(cluster, cluster.key_at(leaving))
    pinned = Holder(cluster, cluster.key_at(leaving))
    cluster.mapping.pin(get_shard_id(pinned.key))
    waiters = [cluster.connect(leaving) for _ in range(3)]
    for number, waiter in enumerate(waiters, 1):
        waiter.request("l", holder.key, f"20 {LEASE}")
        wait_for_waiters(cluster, leaving, holder.key, number)

    leaving.stop()
    places = []
    for waiter in waiters:
        status, shard, _, address, place = waiter.line().split()
        assert (status, int(shard)) == ("error_moved", get_shard_id(holder.key))
        places.append((address, place))
    resumed = []
    for address, place in reversed(places):
        client = cluster.connect(cluster.at(address))
        client.send(f"resume\n_\n{place}\nl\n{holder.key}\n20 {LEASE}\n".encode())
        assert client.line() == "ok"
        resumed.insert(0, client)
    assert ask_once(cluster, holder.key) == "timeout"
    holder.keep()
    fences = [fence(holder.token)]
    assert holder.release() == "ok"
    for client in resumed:
        token = granted(client.line())
        fences.append(fence(token))
        assert client.ask("r", holder.key, token) == "ok"
    assert fences == sorted(fences)
    assert "handed over" not in leaving.log_text(), "all of it was"

    # A pinned shard waits for its server, and its lock with it.
    assert cluster.mapping.records()[get_shard_id(pinned.key)].target == leaving.address
    assert ask_once(cluster, pinned.key) == "error_recovering"
    cluster.start()
    pinned.go_to(leaving)
    pinned.keep()
    assert pinned.release() == "ok"


def stop_together(cluster: ClusterStage) -> None:
    with ThreadPoolExecutor(len(cluster.servers)) as pool:
        list(pool.map(ClusterServer.stop, cluster.servers))


def stop_one_by_one(cluster: ClusterStage) -> None:
    for server in cluster.servers:
        server.stop()


@pytest.mark.parametrize("stop", [stop_together, stop_one_by_one])
def test_all_servers_stop_and_start_and_no_lock_is_lost_nor_waited_for(
    cluster: ClusterStage, stop: Callable[[ClusterStage], None]
) -> None:
    holders = [Holder(cluster, cluster.key_at(server)) for server in cluster.servers]
    released = [Holder(cluster, f"free-{number}-{stop.__name__}") for number in range(50)]
    for holder in released:
        holder.keep()
        assert holder.release() == "ok"
    server = cluster.servers[0]
    key, client = cluster.key_at(server), cluster.connect(server)
    assert client.ask("stable-ref", "_", "ref") == "ok"
    token = client.lock(key, f"0 {LEASE}")

    stop(cluster)
    if time.monotonic() >= min(holder.deadline for holder in holders):
        pytest.skip("the machine is too slow to stop all servers within a lease")
    records = cluster.mapping.records()
    assert [s for s, record in records.items() if record.current] == []
    assert [s for s, record in records.items() if record.clean != record.epoch] == []
    for server in cluster.servers:
        assert "handed over" not in server.log_text(), "all of it was"
    for holder in holders:
        # Stopping and starting may take longer than the lease, which begins anew with the start.
        holder.lease_ends()
    with Pace() as pace:
        cluster.start()
        for holder in released:
            _, line = cluster.follow("l", holder.key, f"0 {LEASE}")
            assert fence(granted(line)) > fence(holder.token)
    assert pace.seconds < cluster.parameters.grace
    for holder in holders:
        holder.go_to(cluster.any)
        holder.keep()
        assert ask_once(cluster, holder.key) == "timeout"
        assert holder.release() == "ok"
    _, line = cluster.follow("n", key, f"{token} {LEASE}")
    assert line == f"ok {LEASE}"
    assert cluster.follow("r", key, token)[1] == "ok"


def wait_for_waiters(cluster: ClusterStage, server: ClusterServer, key: str, number: int) -> None:
    client = cluster.connect(server)

    def probe() -> bool | None:
        report = client.ask("i", key)
        return report.count('"waited_s"') == number or None

    wait_until(probe, PATIENCE, lambda: client.ask("i", key))


def test_after_a_crash_holders_reclaim_and_nobody_else_gets_in_early(
    cluster: ClusterStage,
) -> None:
    killed, restarted, _ = cluster.servers
    # Without the thousands of shards that they have: a few are taken over in no time.
    for server in (killed, restarted):
        server.stop()
    cluster.start()
    holders = [Holder(cluster, cluster.key_at(server)) for server in (killed, restarted)]
    # Its holder does not come back, and may think to hold it until the lease ends.
    silent = Holder(cluster, cluster.key_at(killed))
    free = cluster.key_at(restarted)
    for server in (killed, restarted):
        server.kill()
    wanted = {silent.key: "ok", free: "ok"} | {holder.key: "timeout" for holder in holders}
    answers: dict[str, set[str]] = {key: set() for key in wanted}
    open_ones = set(wanted)

    def probe() -> bool | None:
        for key in list(open_ones):
            for holder in holders:
                holder.try_to_keep()
            _, line = cluster.follow("l", key, f"0 {LEASE}", timeout=0)
            answer = line.partition(" ")[0]
            answers[key].add(answer)
            if answer == wanted[key]:
                open_ones.discard(key)
                if key == silent.key:
                    assert time.monotonic() >= silent.deadline
                    assert fence(granted(line)) > fence(silent.token)
        return not open_ones or None

    with ThreadPoolExecutor() as pool:
        # On its address, with nothing of its old life.
        started = pool.submit(restarted.start)
        wait_until(probe, 3 * PATIENCE, lambda: f"not as it should be: {answers}")
        started.result()
    for key, seen in answers.items():
        assert seen - {""} == {"error_recovering", wanted[key]}
    for holder in holders:
        holder.keep()
        assert holder.release() == "ok"
        _, line = cluster.follow("l", holder.key, f"0 {LEASE}")
        assert fence(granted(line)) > fence(holder.token)


class Deleted(NamedTuple):
    """A shard whose record in etcd somebody has deleted by hand, and a lock of before."""

    key: str
    token: str
    server: ClusterServer
    """Who has taken the shard over."""


@pytest.fixture(scope="module")
def deleted(stage: ClusterStage, beginning: dict[int, bytes]) -> Deleted:
    stage.start()
    stage.wait_settled()
    key = stage.key_at(stage.servers[0])
    shard = get_shard_id(key)
    for server in (stage.servers[1], stage.servers[0]):  # its epochs are above the time of day
        stage.move([shard], server)
    client, line = stage.follow("l", key, f"0 {LEASE}")
    assert client is not None
    epoch = stage.mapping.records()[shard].epoch
    stage.mapping.delete(f"shard/{shard}")

    def back() -> ClusterServer | None:
        record = stage.mapping.records().get(shard)
        is_back = record is not None and record.epoch > epoch and record.current
        return stage.at(record.current) if record is not None and is_back else None

    server = wait_until(back, PATIENCE, lambda: "nobody has taken the shard over")
    return Deleted(key, granted(line), server)


def test_a_lock_survives_the_end_of_its_shard_s_record_in_etcd(
    cluster: ClusterStage, deleted: Deleted
) -> None:
    """It costs what a crash costs, and no lock gets a second holder."""
    key, token, server = deleted
    assert cluster.connect(server).ask("l", key, f"0 {LEASE}").startswith("error_recovering")
    assert cluster.follow("n", key, f"{token} {LEASE}")[1] == f"ok {LEASE}"
    assert cluster.follow("r", key, token)[1] == "ok"


class Early(ClusterServer):
    """A server that is started before its etcd."""

    def _after_start(self) -> None:
        self.wait_log("DEBUG dflockd: no connection to etcd")  # at least the second attempt


def test_a_server_waits_for_etcd_and_grants_nothing_once_that_is_gone(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path)
    etcd.port = free_port()
    flags = ("--cluster-serving-lease", str(SERVING_LEASE), "--shutdown-timeout", "1")
    flags += ("--http-port", "0", "--log-level", "DEBUG")
    with Early(tmp_path, "--cluster", f"etcd://{etcd.endpoint}", *flags, name="early") as server:
        lives_and_says_once_what_is_missing(server)
        with etcd:
            server.wait_joined()
            client = server.connect()
            token, another = (_asks_until_it_is_granted(client, key) for key in ("a", "b"))
            assert client.ask("r", "b", another) == "ok"
            etcd.pause()
            silent = time.monotonic()
            assert _asks_until_it_is_refused(client, "b") < silent + SERVING_LEASE
            assert client.ask("n", "a", token).startswith("error_recovering")
            client.close()
            server.wait_log(LAPSED)
            # It hands nothing over, and ends all the same.
            server.stop()


def lives_and_says_once_what_is_missing(server: ClusterServer) -> None:
    assert server.log_text().count("WARNING dflockd: no connection to etcd") == 1
    assert "retrying until it works" in server.log_text()
    where = server.wait_log("live page").split("live page: ")[1].split()[0]
    with urllib.request.urlopen(f"{where}healthz", timeout=PATIENCE) as page:
        assert page.status == 200
    document = readiness(server)
    assert document["ready"] is False
    assert "no connection to etcd" in json.dumps(document)
    client = server.connect()
    assert client.ask("l", "a", "0").startswith("error_recovering")
    client.close()


def test_a_shard_whose_record_was_deleted_grants_again_in_the_end(
    cluster: ClusterStage, deleted: Deleted
) -> None:
    """The tests between have taken most of the wait."""
    _, line = cluster.follow("l", deleted.key, f"0 {LEASE}", timeout=4 * PATIENCE)
    assert fence(granted(line)) > fence(deleted.token)


def test_one_connection_holds_locks_of_several_shards(cluster: ClusterStage) -> None:
    server = cluster.servers[2]
    client = cluster.connect(server)
    keys = [cluster.key_at(server) for _ in range(5)]
    assert len({get_shard_id(key) for key in keys}) == len(keys)
    for key in keys:
        _asks_until_it_is_granted(client, key)
    client.close()
    for key in keys:
        assert cluster.follow("l", key, f"5 {LEASE}")[1].startswith("ok")


# etcd.


def test_holders_keep_their_locks_while_etcd_is_restarted(
    cluster: ClusterStage, etcd: Etcd
) -> None:
    holders = [Holder(cluster, cluster.key_at(server)) for server in cluster.servers]
    etcd.stop()
    etcd.start()
    for holder in holders:
        holder.keep()
        assert ask_once(cluster, holder.key) == "timeout"
        assert holder.release() == "ok"


# Servers that cannot be part of it.


def test_other_terms_than_those_of_the_cluster_refuse_to_start(
    cluster: ClusterStage, tmp_path: Path
) -> None:
    other = ClusterServer(
        tmp_path, *cluster.arguments(), "--cluster-serving-lease", "3", name="other-parameters"
    )
    line = _complaint(other)
    assert "--cluster-serving-lease is 3 here and 2 in the cluster" in line
    assert "--cluster-prefix /dflockd" in line


def test_parameters_that_were_deleted_refuse_to_start_and_are_written_again_as_it_says(
    cluster: ClusterStage, etcd: Etcd, tmp_path: Path
) -> None:
    kept = etcd.control("get", "/dflockd/meta")["kvs"][0]["value"]
    etcd.control("del", "/dflockd/meta")
    line = _complaint(ClusterServer(tmp_path, *cluster.arguments(), name="without-parameters"))
    assert "/dflockd/meta is missing" in line
    etcd.control(*shlex.split(line.partition("etcdctl ")[2]))
    assert etcd.control("get", "/dflockd/meta")["kvs"][0]["value"] == kept


def _complaint(server: ClusterServer) -> str:
    """The one line with which a server refuses to start."""
    with pytest.raises(Exception, match="ended before it logged"):
        server.start()
    [line] = server.log_text().splitlines()
    assert not server.running
    return line


def test_of_two_servers_with_one_address_the_second_waits_for_the_end_of_the_first(
    cluster: ClusterStage, tmp_path: Path
) -> None:
    first = cluster.servers[0]
    holder = Holder(cluster, cluster.key_at(first))
    # It is not where it says: that is for the end, when a name or an address changes hands.
    flags = ("--advertise", first.address, "--advertise-check", "off")
    second = ClusterServer(tmp_path, *cluster.arguments(), *flags, name="second")
    try:
        second.start()
        client = second.connect()
        assert client.ask("l", holder.key, f"0 {LEASE}").startswith(
            ("error_recovering", "error_moved")
        )
        holder.keep()
        assert "is in the cluster" not in second.log_text()
        first.stop()
        second.wait_log(f"{first.address} is in the cluster")
    finally:
        second.kill()
        client.close()


def test_while_etcd_is_silent_grants_stop_with_the_promise_and_go_on_with_it(
    cluster: ClusterStage, etcd: Etcd
) -> None:
    holders = [Holder(cluster, cluster.key_at(server)) for server in cluster.servers]
    free = [cluster.key_at(server) for server in cluster.servers]
    before = [server.log_text().count(LAPSED) for server in cluster.servers]
    etcd.pause()
    paused = time.monotonic()
    try:
        for server, key in zip(cluster.servers, free, strict=True):
            granted_at = _asks_until_it_is_refused(cluster.connect(server), key)
            assert granted_at < paused + SERVING_LEASE, (
                "it must not grant for longer than it may serve"
            )
        assert {holder.renew() for holder in holders} == {"error_recovering"}
        for server, count in zip(cluster.servers, before, strict=True):
            wait_until(
                lambda server=server, count=count: server.log_text().count(LAPSED) > count or None,
                PATIENCE,
                server.log_text,
            )
    finally:
        etcd.resume()
    for holder in holders:
        holder.keep()
        assert holder.release() == "ok"


def _asks_until_it_is_granted(client: RawClient, key: str) -> str:
    """Return the token of a lock whose shard is about to be served."""

    def probe() -> str | None:
        line = client.ask("l", key, f"0 {LEASE}")
        return granted(line) if line.startswith("ok") else None

    return wait_until(probe, PATIENCE, lambda: f"{key} is not granted")


def _asks_until_it_is_refused(client: RawClient, key: str) -> float:
    """Return when a lock was last asked for that was granted; ``-inf`` if none was."""
    granted_at, until = -math.inf, time.monotonic() + PATIENCE
    while (asked_at := time.monotonic()) < until:
        line = client.ask("l", key, f"0 {LEASE}")
        if not line.startswith("ok"):
            assert line.startswith("error_recovering"), line
            return granted_at
        granted_at = asked_at
        assert client.ask("r", key, line.split()[1]) in ("ok", "error_recovering")
    raise AssertionError("it still grants")
