"""Real servers over a real etcd: a lock and its queue go where their shard goes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.dflockd.cluster.holders import (
    LEASE,
    Holder,
    ask_at_once,
    asks_until_it_is_granted,
    fence,
    wait_for_waiters,
)
from tests.dflockd.cluster.stage import ClusterServer, ClusterStage
from tests.dflockd.raw_server import granted
from tests.pace import Pace


def test_a_lock_goes_with_its_shard(cluster: ClusterStage) -> None:
    there, here, _ = cluster.servers
    holder = Holder(cluster, cluster.key_at(there))
    cluster.move([cluster.shard_of(holder.key)], here)
    assert holder.renew() in ("error_moved", "")
    assert ask_at_once(cluster, holder.key) == "timeout"
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
    cluster.mapping.pin(cluster.shard_of(pinned.key))
    waiters = [cluster.connect(leaving) for _ in range(3)]
    for number, waiter in enumerate(waiters, 1):
        waiter.request("l", holder.key, f"20 {LEASE}")
        wait_for_waiters(cluster, leaving, holder.key, number)

    leaving.stop()
    places = []
    for waiter in waiters:
        status, shard, _, address, place = waiter.line().split()
        assert (status, int(shard)) == ("error_moved", cluster.shard_of(holder.key))
        places.append((address, place))
    resumed = []
    for address, place in reversed(places):
        client = cluster.connect(cluster.at(address))
        client.request("acquire", holder.key, f"timeout=20 lease={LEASE} ticket={place}")
        resumed.insert(0, client)
    assert ask_at_once(cluster, holder.key) == "timeout"
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
    assert cluster.mapping.records()[cluster.shard_of(pinned.key)].target == leaving.address
    assert ask_at_once(cluster, pinned.key, patience=0) == "error_recovering"
    cluster.start()
    pinned.go_to(leaving)
    pinned.keep()
    assert pinned.release() == "ok"


def test_a_paused_key_goes_with_its_shard_and_all_who_wait(cluster: ClusterStage) -> None:
    """Nobody begins at either server while it is paused; then all do, in their order."""
    there, here, _ = cluster.servers
    key = cluster.key_at(there)
    assert cluster.connect(there).ask("pause", key, "by=me reason=why") == "ok"
    waiters = [cluster.connect(there) for _ in range(300)]
    for waiter in waiters:
        assert waiter.ask("e", key, LEASE) == "queued"
        waiter.request("w", key, "60")
    cluster.move([cluster.shard_of(key)], here)
    resumed = []
    for waiter in waiters:
        status, _, _, _, ticket = waiter.line().split()
        assert status == "error_moved"
        client = cluster.connect(here)
        client.request("acquire", key, f"timeout=60 lease={LEASE} ticket={ticket}")
        resumed.append(client)
    wait_for_waiters(cluster, here, key, len(waiters))
    report = json.loads(cluster.connect(here).ask("i", key).removeprefix("ok "))
    assert (report["holders"], report["paused"]["reason"]) == ([], "why")
    assert cluster.connect(here).ask("resume", key) == "ok"
    for client in resumed:
        token = granted(client.line())
        assert client.ask("r", key, token) == "ok"


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
        assert ask_at_once(cluster, holder.key) == "timeout"
        assert holder.release() == "ok"
    _, line = cluster.follow("n", key, f"{token} {LEASE}")
    assert line == f"ok {LEASE}"
    assert cluster.follow("r", key, token)[1] == "ok"


def test_one_connection_holds_locks_of_several_shards(cluster: ClusterStage) -> None:
    server = cluster.servers[2]
    client = cluster.connect(server)
    keys = [cluster.key_at(server) for _ in range(5)]
    assert len({cluster.shard_of(key) for key in keys}) == len(keys)
    for key in keys:
        asks_until_it_is_granted(client, key)
    client.close()
    for key in keys:
        assert cluster.follow("l", key, f"5 {LEASE}")[1].startswith("ok")
