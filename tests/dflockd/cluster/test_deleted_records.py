"""Real servers over a real etcd in which somebody deletes the record of a shard by hand."""

from __future__ import annotations

from examples.demo.stage import wait_until
from tests.dflockd.cluster.holders import LEASE, fence
from tests.dflockd.cluster.stage import ClusterServer, ClusterStage
from tests.dflockd.raw_server import PATIENCE, granted


def test_it_costs_what_a_crash_costs_and_no_lock_gets_a_second_holder(
    cluster: ClusterStage,
) -> None:
    first, second, _ = cluster.servers
    key = cluster.key_at(first)
    shard = cluster.shard_of(key)
    for server in (second, first):  # its epochs are above the time of day
        cluster.move([shard], server)
    token = granted(cluster.follow("l", key, f"0 {LEASE}")[1])
    epoch = cluster.mapping.records()[shard].epoch
    cluster.mapping.delete(f"shard/{shard}")

    def back() -> ClusterServer | None:
        record = cluster.mapping.records().get(shard)
        is_back = record is not None and record.epoch > epoch and record.current
        return cluster.at(record.current) if record is not None and is_back else None

    server = wait_until(back, PATIENCE, lambda: "nobody has taken the shard over")
    # Nobody else gets it; `timeout` says that its holder is known there already.
    answer = cluster.connect(server).ask("l", key, f"0 {LEASE}")
    assert answer.startswith(("error_recovering", "timeout")), answer
    assert cluster.follow("n", key, f"{token} {LEASE}")[1] == f"ok {LEASE}"
    assert cluster.follow("r", key, token)[1] == "ok"
    _, line = cluster.follow("l", key, f"0 {LEASE}", timeout=4 * PATIENCE)
    assert fence(granted(line)) > fence(token)
