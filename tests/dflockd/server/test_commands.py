"""Every command as clients use it."""

from __future__ import annotations

import re

from tests.dflockd.raw_server import (
    PATIENCE,
    RawClient,
    ServerProcess,
    StartServer,
    eventually,
    granted,
)
from tests.dflockd.server.server_support import inspect, queue_up, stats, takes_seconds, waiters


def test_lock_and_release(alice: RawClient, bob: RawClient) -> None:
    token = alice.lock("plain")
    assert re.fullmatch("[0-9a-f]{32}", token)
    assert bob.ask("l", "plain", 0) == "timeout"
    assert bob.ask("r", "plain", "0" * 32) == "error"
    assert alice.ask("r", "plain", token) == "ok"
    assert alice.ask("r", "plain", token) == "error"
    assert bob.ask("l", "plain", "0 30").endswith(" 30")


def test_default_lease_is_named_in_the_grant(alice: RawClient) -> None:
    assert alice.ask("l", "default lease".replace(" ", "-"), 0).endswith(" 33")


def test_fifo(server: ServerProcess, alice: RawClient, bob: RawClient) -> None:
    token = alice.lock("fifo")
    queue = [queue_up(server, bob, "fifo", 30) for _ in range(5)]
    assert alice.ask("r", "fifo", token) == "ok"
    for client in queue:
        token = granted(client.line())
        assert client.ask("r", "fifo", token) == "ok"


def test_semaphore(server: ServerProcess, alice: RawClient, bob: RawClient) -> None:
    first, second = (granted(alice.ask("sl", "sem", "0 2")) for _ in range(2))
    assert first != second
    assert bob.ask("sl", "sem", "0 2") == "timeout"
    assert bob.ask("sl", "sem", "0 3") == "error_limit_mismatch"
    bob.request("sl", "sem", "10 2 7")
    assert alice.ask("sn", "sem", f"{second} 9") == "ok 9"
    assert alice.ask("sr", "sem", first) == "ok"
    assert bob.line().endswith(" 7")


def test_locks_and_semaphores_are_separate(alice: RawClient, bob: RawClient) -> None:
    token = alice.lock("both")
    granted(bob.ask("sl", "both", "0 1"))
    assert bob.ask("sr", "both", token) == "error"
    assert alice.ask("r", "both", token) == "ok"


def test_two_phases(alice: RawClient, bob: RawClient) -> None:
    assert bob.ask("w", "two", 1) == "error_not_enqueued"
    token = granted(alice.ask("e", "two", ""))
    assert alice.ask("e", "two", 30) == "error_already_enqueued"
    assert alice.ask("w", "two", 1) == f"ok {token} 33"
    assert bob.ask("e", "two", 20) == "queued"
    assert bob.ask("e", "two", 20) == "error_already_enqueued"
    bob.request("w", "two", 10)
    assert alice.ask("r", "two", token) == "ok"
    assert bob.line().endswith(" 20")


def test_try_of_a_wait_gives_up_the_place(alice: RawClient, bob: RawClient) -> None:
    alice.lock("poll")
    assert bob.ask("e", "poll", "") == "queued"
    assert bob.ask("w", "poll", 0) == "timeout"
    assert bob.ask("w", "poll", 0) == "error_not_enqueued"


def test_a_position_is_kept_for_who_comes_back(
    server: ServerProcess, alice: RawClient, bob: RawClient
) -> None:
    token = alice.lock("away")
    assert bob.ask("e", "away", "") == "queued"
    bob.send(b"wait\naway\ntimeout=1 away=60000 hold=60000\nping\n_\n_\n")
    ticket = re.fullmatch("timeout ([0-9a-f]{32})", bob.line())
    assert bob.line() == "ok"
    assert ticket is not None
    bob.close()
    newcomer = server.connect()
    assert newcomer.ask("e", "away", "") == "queued"
    assert [waiter["away"] for waiter in inspect(newcomer, "away")["waiters"]] == [True, False]

    back = server.connect()
    assert back.ask("enqueue", "away", f"ticket={ticket[1]}") == "queued"
    assert [waiter["away"] for waiter in inspect(newcomer, "away")["waiters"]] == [False, False]
    assert alice.ask("r", "away", token) == "ok"
    granted(back.ask("w", "away", 0))


def test_a_slot_is_held_for_who_comes_back(
    server: ServerProcess, alice: RawClient, bob: RawClient
) -> None:
    token = alice.lock("held")
    assert bob.ask("e", "held", "") == "queued"
    ticket = bob.ask("wait", "held", "timeout=0 away=0 hold=30000").removeprefix("timeout ")
    assert alice.ask("r", "held", token) == "ok"
    assert alice.ask("l", "held", 0) == "timeout"
    assert bob.ask("enqueue", "held", f"ticket={ticket} lease=20").startswith("acquired ")


def test_a_slot_is_not_held_for_longer_than_was_asked_for(
    server: ServerProcess, alice: RawClient, bob: RawClient
) -> None:
    token = alice.lock("unclaimed")
    assert bob.ask("e", "unclaimed", "") == "queued"
    assert bob.ask("wait", "unclaimed", "timeout=0 away=0 hold=300").startswith("timeout ")
    assert alice.ask("r", "unclaimed", token) == "ok"
    granted(server.connect().ask("l", "unclaimed", int(PATIENCE) - 1))


@takes_seconds
def test_whoever_asks_for_no_reservation_is_never_told_of_one(
    alice: RawClient, bob: RawClient
) -> None:
    alice.lock("published")
    assert bob.ask("l", "published", 0) == bob.ask("l", "published", 1) == "timeout"
    for timeout in (0, 1):
        assert bob.ask("e", "published", "") == "queued"
        assert bob.ask("w", "published", timeout) == "timeout"
    # What one request asks for, the next does not.
    reserved = bob.ask("acquire", "published", "timeout=0 away=1000 hold=1000")
    assert reserved.startswith("timeout ")
    assert bob.ask("acquire", "published", "timeout=0") == "timeout"
    assert len(inspect(alice, "published")["waiters"]) == 1


def test_the_latest_request_sets_the_limit(
    server: ServerProcess, alice: RawClient, bob: RawClient
) -> None:
    first = granted(alice.ask("acquire", "limit", "timeout=0"))
    assert bob.ask("acquire", "limit", "timeout=0") == "timeout"
    waiter = queue_up(server, bob, "limit", 30)
    second = granted(bob.ask("acquire", "limit", "timeout=9 limit=3"))
    granted(waiter.line())  # it came first, and had its slot before that
    # Nobody is thrown out, and nobody gets in until there is room.
    assert bob.ask("acquire", "limit", "timeout=0 limit=2") == "timeout"
    assert len(inspect(alice, "limit")["holders"]) == 3
    for token in (first, second):
        assert alice.ask("r", "limit", token) == "ok"
    granted(alice.ask("acquire", "limit", "timeout=0 limit=2"))
    assert bob.ask("l", "limit", 0) == "timeout"
    granted(bob.ask("sl", "limit", "0 2"))  # a semaphore of a published client is another


@takes_seconds
def test_stale_wait_of_0_5_0(server: ServerProcess, alice: RawClient, bob: RawClient) -> None:
    # The lease ran out before the `w`: the token is void, whoever holds the lock by then.
    token = alice.lock("stale")
    assert bob.ask("e", "stale", 1) == "queued"
    third = queue_up(server, alice, "stale", "10 30")
    assert alice.ask("r", "stale", token) == "ok"
    granted(third.line())
    assert bob.ask("w", "stale", 5) in ("error_not_enqueued", "error_lease_expired")
    assert bob.ask("e", "stale", 1) == "queued"


def test_small_commands(alice: RawClient) -> None:
    assert alice.ask("ping") == "ok"
    assert alice.ask("barrier", "", "") == "ok"
    assert alice.ask("stable-ref", "publisher-1") == "ok"
    assert alice.ask("stable-ref", "publisher-1") == "error"
    assert alice.ask("auth", "_", "secret") == "error"  # no secret is set here
    assert alice.ask("ping") == "ok"


def test_stats(start_server: StartServer) -> None:
    server = start_server()
    alice, bob = server.connect(), server.connect()
    bob.ask("ping")
    alice.lock("ключ", "0 30")
    granted(alice.ask("sl", "sem", "0 3 30"))
    granted(alice.ask("sl", "one", "0 1 30"))
    bob.request("l", "ключ", 30)
    eventually(lambda: waiters(alice, "ключ") == 1)
    report = stats(alice)
    assert report["connections"] == 2
    assert [(row["key"], row["waiters"]) for row in report["locks"]] == [("ключ", 1), ("one", 0)]
    row = report["locks"][0]
    assert isinstance(row["owner_conn_id"], int)
    assert 0 < row["lease_expires_in_s"] <= 30
    assert report["semaphores"] == [{"key": "sem", "limit": 3, "holders": 1, "waiters": 0}]
    assert report["idle_locks"] == report["idle_semaphores"] == []
