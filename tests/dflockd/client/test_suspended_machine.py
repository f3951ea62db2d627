"""A machine that is suspended: its clock goes on meanwhile, and no time-out does."""

from __future__ import annotations

import time

from dflockd import clock, sync_client
from tests.dflockd.client_support import Time, is_free
from tests.dflockd.raw_server import ServerProcess

HOUR = 3600.0


def test_what_is_held_over_it_and_what_is_taken_after(
    server: ServerProcess, clients_time: Time
) -> None:
    servers = [("127.0.0.1", server.port)]
    before = sync_client.DistributedLock("before", lease_ttl_s=60, servers=servers)
    assert before.acquire()
    time.sleep(0.5)  # it is watched by now, and sleeps until the renewal is due
    clients_time.jump_to(clock.now() + HOUR)
    assert not before.held
    assert before.state == "lost"

    after = sync_client.DistributedLock("after", lease_ttl_s=1, servers=servers)
    assert after.acquire()
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        assert after.held, "nobody renews it"
        time.sleep(0.05)
    assert not is_free(server, "after")
    assert after.release() is True
    assert before.release() is False
    assert is_free(server, "before")
