"""Limits, and peers that do not read."""

from __future__ import annotations

import socket

from tests.dflockd.raw_server import ServerProcess, StartServer, eventually, granted
from tests.dflockd.server.server_support import flood, stats, takes_seconds


def test_d1_existing_keys_do_not_meet_max_locks(start_server: StartServer) -> None:
    # D1: at the cap even known keys got error_max_locks, and released keys counted for a minute.
    server = start_server("--max-locks", "2")
    alice, bob = server.connect(), server.connect()
    tokens = [alice.lock("k1"), alice.lock("k2")]
    assert bob.ask("l", "k3", 0) == "error_max_locks"
    assert bob.ask("e", "k3", "") == "error_max_locks"
    assert bob.ask("sl", "k1", "0 1") == "error_max_locks"
    assert bob.ask("l", "k1", 0) == "timeout"
    bob.request("l", "k1", 10)
    assert alice.ask("r", "k1", tokens[0]) == "ok"
    token = granted(bob.line())
    assert bob.ask("r", "k1", token) == "ok"
    granted(bob.ask("l", "k3", 0))


@takes_seconds
def test_d15_a_peer_that_does_not_read_is_dropped(start_server: StartServer) -> None:
    # D15: a reply that could not be sent held its connection, and its locks, for ever.
    server = start_server("--write-timeout", "1")
    alice = server.connect()
    deaf = server.connect(receive=4096)
    deaf.lock("k", "0 600")
    alice.request("l", "k", 30)
    flood(deaf, b"stats\n_\n_\n" * 1000)
    granted(alice.line())
    server.wait_for_log("write timeout")


@takes_seconds
def test_d15_the_end_of_a_peer_that_does_not_read_frees_its_locks(
    start_server: StartServer,
) -> None:
    # What is still to be sent may not hold up the release, nor the end of the connection.
    server = start_server("--write-timeout", "1")
    alice, deaf = server.connect(), server.connect(receive=4096)
    for number in range(100):
        alice.lock(f"{number}-{'x' * 200}", "0 600")
    deaf.lock("k", "0 600")
    deaf.send(b"stats\n_\n_\n" * 100)  # about 3 MB to be sent
    deaf.sock.shutdown(socket.SHUT_WR)
    granted(alice.ask("l", "k", 30))
    eventually(lambda: stats(alice)["connections"] == 1)


def test_d15_a_peer_that_reads_slowly_gets_everything(server: ServerProcess) -> None:
    slow = server.connect(receive=4096)
    slow.send(b"stats\n_\n_\n" * 3000)
    for _ in range(3000):
        assert slow.line().startswith("ok {")
    assert slow.ask("ping") == "ok"


def test_d16_max_connections(start_server: StartServer) -> None:
    # D16: nothing was bounded.
    server = start_server("--max-connections", "2")
    first, second = server.connect(), server.connect()
    assert first.ask("ping") == second.ask("ping") == "ok"
    assert server.connect().line() == ""
    second.close()
    eventually(lambda: stats(first)["connections"] == 1)
    assert server.connect().ask("ping") == "ok"


def test_d16_max_waiters(start_server: StartServer) -> None:
    server = start_server("--max-waiters", "1")
    alice, bob = server.connect(), server.connect()
    alice.lock("k")
    assert bob.ask("e", "k", "") == "queued"
    assert alice.ask("l", "k", 5) == "error_max_waiters"
    assert alice.ask("l", "k", 0) == "error_max_waiters"
    assert alice.ask("e", "k", "") == "error_max_waiters"
    granted(alice.ask("l", "k2", 0))


def test_d21_wrong_tokens_leave_nothing_behind(start_server: StartServer) -> None:
    # D21: they kept idle keys alive, and those counted.
    server = start_server("--max-locks", "1")
    client = server.connect()
    for number in range(20):
        assert client.ask("r", f"k{number}", "0" * 32) == "error"
        assert client.ask("n", f"k{number}", "0" * 32) == "error"
    assert stats(client)["locks"] == []
    token = client.lock("k")
    assert client.ask("r", "k", token) == "ok"
    assert stats(client)["locks"] == []
