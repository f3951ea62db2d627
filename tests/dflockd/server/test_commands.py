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


def test_keep_and_wait_in_one_piece_are_answered_in_order(
    server: ServerProcess, alice: RawClient, bob: RawClient
) -> None:
    token = alice.lock("away")
    assert bob.ask("e", "away", "") == "queued"
    bob.send(b"keep\n_\n60000 60000\nw\naway\n1\nping\n_\n_\n")
    assert bob.line() == "ok"
    place = re.fullmatch("timeout ([0-9a-f]{32})", bob.line())
    assert bob.line() == "ok"
    assert place is not None
    bob.close()
    newcomer = server.connect()
    assert newcomer.ask("e", "away", "") == "queued"
    assert [waiter["away"] for waiter in inspect(newcomer, "away")["waiters"]] == [True, False]

    back = server.connect()
    back.send(f"resume\n_\n{place[1]}\ne\naway\n\n".encode())
    assert [back.line(), back.line()] == ["ok", "queued"]
    assert [waiter["away"] for waiter in inspect(newcomer, "away")["waiters"]] == [False, False]
    assert alice.ask("r", "away", token) == "ok"
    granted(back.ask("w", "away", 0))


def test_a_slot_is_held_for_who_comes_back(
    server: ServerProcess, alice: RawClient, bob: RawClient
) -> None:
    token = alice.lock("held")
    assert bob.ask("e", "held", "") == "queued"
    bob.send(b"keep\n_\n0 30000\nw\nheld\n0\n")
    assert bob.line() == "ok"
    place = bob.line().removeprefix("timeout ")
    assert alice.ask("r", "held", token) == "ok"
    assert alice.ask("l", "held", 0) == "timeout"
    assert bob.ask("resume", "_", place) == "ok"
    assert bob.ask("e", "held", "20").startswith("acquired ")


def test_a_slot_is_not_held_for_longer_than_was_asked_for(
    server: ServerProcess, alice: RawClient, bob: RawClient
) -> None:
    token = alice.lock("unclaimed")
    assert bob.ask("e", "unclaimed", "") == "queued"
    bob.send(b"keep\n_\n0 300\nw\nunclaimed\n0\n")
    assert bob.line() == "ok"
    assert bob.line().startswith("timeout ")
    assert alice.ask("r", "unclaimed", token) == "ok"
    granted(server.connect().ask("l", "unclaimed", int(PATIENCE) - 1))


@takes_seconds
def test_whoever_says_no_keep_is_never_told_of_a_place(alice: RawClient, bob: RawClient) -> None:
    alice.lock("published")
    assert bob.ask("l", "published", 0) == bob.ask("l", "published", 1) == "timeout"
    for timeout in (0, 1):
        assert bob.ask("e", "published", "") == "queued"
        assert bob.ask("w", "published", timeout) == "timeout"
    # An `l` keeps nothing, whatever was said before it.
    assert bob.ask("keep", "_", "1000 1000") == "ok"
    assert bob.ask("l", "published", 1) == "timeout"
    assert inspect(alice, "published")["waiters"] == []


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
