"""Real servers over a real etcd: what a crash costs, and whom."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from examples.demo.stage import wait_until
from tests.dflockd.cluster.holders import LEASE, Holder, fence
from tests.dflockd.cluster.stage import ClusterStage
from tests.dflockd.raw_server import PATIENCE, granted


def test_after_a_crash_holders_reclaim_and_nobody_else_gets_in_early(cluster: ClusterStage) -> None:
    killed, restarted, _ = cluster.servers
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
