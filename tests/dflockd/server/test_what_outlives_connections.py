"""What stands on a connection, and what outlives it."""

from __future__ import annotations

import signal
import socket
import time

import pytest

from tests.dflockd.raw_server import RawClient, ServerProcess, StartServer, eventually, granted
from tests.dflockd.server.server_support import queue_up, stats, takes_seconds, waiters


@pytest.mark.parametrize("flag", ["", "--no-auto-release-on-disconnect"])
@pytest.mark.parametrize("end", ["close", "half-close", "reset"])
def test_d5_a_dead_waiter_is_skipped_at_once(
    start_server: StartServer, flag: str, end: str
) -> None:
    # D5: while a request waited nobody saw the end of its connection; without auto-release the dead
    # waiter got the lock and kept it for its whole lease.
    server = start_server(*filter(None, [flag]), "--max-waiters", "2")
    alice, carol = server.connect(), server.connect()
    token = alice.lock("k", "0 60")
    dead = queue_up(server, carol, "k", "60 60")
    alive = queue_up(server, carol, "k", "60 60")
    assert carol.ask("l", "k", 5) == "error_max_waiters"
    if end == "half-close":
        dead.sock.shutdown(socket.SHUT_WR)
    elif end == "reset":
        dead.reset()
    else:
        dead.close()
    eventually(lambda: waiters(carol, "k") == 1)
    assert alice.ask("r", "k", token) == "ok"
    granted(alive.line())
    if end == "half-close":
        assert dead.line() == ""


@pytest.mark.parametrize("flag", ["", "--no-auto-release-on-disconnect"])
def test_d5_a_waiter_that_ends_with_the_release_is_skipped(
    start_server: StartServer, flag: str
) -> None:
    # The process is stopped meanwhile, so that both come to it in one turn of the loop.
    server = start_server(*filter(None, [flag]))
    alice, carol, alive = server.connect(), server.connect(), server.connect()
    for _ in range(10):
        token = alice.lock("k", "0 60")
        dead = queue_up(server, carol, "k", "60 60")
        alive.request("l", "k", "60 60")
        eventually(lambda: waiters(carol, "k") == 2)
        server.suspend()
        dead.close()
        alice.request("r", "k", token)
        server.signal(signal.SIGCONT)
        assert alice.line() == "ok"
        assert alive.ask("r", "k", granted(alive.line())) == "ok"


def test_d18_a_new_connection_is_not_taken_for_an_old_one(start_server: StartServer) -> None:
    # D18: the number of a connection was a memory address, used again for a later one.
    server = start_server("--no-auto-release-on-disconnect")
    watcher, first = server.connect(), server.connect()
    first.lock("k", "0 60")
    owners = {stats(watcher)["locks"][0]["owner_conn_id"]}
    first.close()
    eventually(lambda: stats(watcher)["connections"] == 1)
    for number in range(5):
        client = server.connect()
        client.lock(f"k{number}", "0 60")
        row = next(row for row in stats(watcher)["locks"] if row["key"] == f"k{number}")
        assert row["owner_conn_id"] not in owners
        owners.add(row["owner_conn_id"])
        client.close()
        eventually(lambda: stats(watcher)["connections"] == 1)
    assert {row["owner_conn_id"] for row in stats(watcher)["locks"]} == {0}
    assert len(stats(watcher)["locks"]) == 6


def test_d27_resets_are_no_errors(start_server: StartServer) -> None:
    # D27: some ends of a connection were unhandled errors.
    server = start_server()
    watcher = server.connect()
    for number in range(20):
        client = server.connect()
        client.lock(f"k{number}")
        client.send([b"", b"l\nk", b"l\nk0\n30\n", b"stats\n_\n_\n" * 500][number % 4])
        client.reset()
    eventually(lambda: stats(watcher)["connections"] == 1)
    assert stats(watcher)["locks"] == []
    assert "Traceback" not in "".join(server.log)


def test_end_of_a_connection_releases(server: ServerProcess, alice: RawClient) -> None:
    for end in ("close", "reset"):
        holder = server.connect()
        holder.lock("of-a-connection", "0 60")
        assert holder.ask("e", "of-a-connection", "") == "queued"
        waiter = queue_up(server, alice, "of-a-connection", 30)
        getattr(holder, end)()
        token = granted(waiter.line())
        assert waiter.ask("r", "of-a-connection", token) == "ok"


def test_stable_ref_detaches_holds(server: ServerProcess, alice: RawClient) -> None:
    publisher = server.connect()
    assert publisher.ask("stable-ref", "publisher-1") == "ok"
    token = publisher.lock("detached", "0 60")
    second = publisher.lock("detached-2", "0 1")
    publisher.close()
    granted(alice.ask("l", "detached-2", 10))  # its lease ends it
    assert alice.ask("l", "detached", 0) == "timeout"
    # Who renews takes over; that connection's end counts from then on.
    worker = server.connect()
    assert worker.ask("n", "detached", f"{token} 30") == "ok 30"
    assert worker.ask("n", "detached-2", second) == "error"
    assert alice.ask("l", "detached", 0) == "timeout"
    worker.close()
    granted(alice.ask("l", "detached", 10))


@takes_seconds
def test_orphans_wait_for_their_owner_after_a_reset_only(start_server: StartServer) -> None:
    server = start_server("--orphan-ttl", "1")
    watcher = server.connect()
    for end, orphaned in (("close", False), ("reset", True)):
        holder = server.connect()
        holder.lock("k", "0 60")
        getattr(holder, end)()
        eventually(lambda: stats(watcher)["connections"] == 1)
        assert len(stats(watcher)["locks"]) == orphaned
    begun = time.monotonic()
    token = granted(watcher.ask("l", "k", 10))
    assert time.monotonic() - begun > 0.5
    assert watcher.ask("r", "k", token) == "ok"

    holder = server.connect()
    token = holder.lock("k", "0 60")
    holder.reset()
    eventually(lambda: stats(watcher)["connections"] == 1)
    owner = server.connect()
    assert owner.ask("n", "k", f"{token} 60") == "ok 60"
    assert watcher.ask("l", "k", 2) == "timeout"
    assert owner.ask("r", "k", token) == "ok"
