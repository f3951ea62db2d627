"""The end of the process."""

from __future__ import annotations

import signal
import time

import pytest

from tests.dflockd.raw_server import StartServer, eventually
from tests.dflockd.server.server_support import queue_up, takes_seconds, waiters

MANY = 401
"""More replies than a turn of the loop has time for."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_d14_stops_at_once_with_idle_clients(
    start_server: StartServer, number: signal.Signals
) -> None:
    # D14: SIGINT waited for the last idle client, SIGTERM said goodbye to nobody.
    server = start_server()
    idle = [server.connect() for _ in range(3)]
    assert {client.ask("ping") for client in idle} == {"ok"}
    server.signal(number)
    assert {client.line() for client in idle} == {""}
    assert server.wait() == 0
    with pytest.raises(ConnectionRefusedError):
        server.connect()


def test_d14_draining_serves_holders_and_sends_waiters_away(start_server: StartServer) -> None:
    server = start_server()
    alice, carol, queued = (server.connect() for _ in range(3))
    token, second = alice.lock("k", "0 30"), alice.lock("k2", "0 30")
    other = carol.lock("other", "0 30")
    assert queued.ask("e", "k", "") == "queued"
    waiter = queue_up(server, carol, "k", 30)
    server.signal(signal.SIGTERM)
    assert waiter.line() == "error_draining"
    assert waiter.line() == ""
    assert queued.line() == ""
    server.wait_for_log("waiting for 2 connections")
    assert alice.ask("n", "k", f"{token} 20") == "ok 20"
    for command in ("l", "e", "w", "sl", "stats", "ping", "nonsense"):
        assert alice.ask(command, "new", 0) == "error_draining"
    assert alice.ask("r", "k", token) == "ok"
    assert alice.ask("r", "k2", second) == "ok"
    assert alice.line() == ""
    assert server.process.poll() is None
    assert carol.ask("r", "other", other) == "ok"
    assert server.wait() == 0


def test_draining_tells_all_who_wait_however_many_they_are(start_server: StartServer) -> None:
    server = start_server()
    holder = server.connect()
    token = holder.lock("k", "0 30")
    queue = [server.connect() for _ in range(MANY)]
    for client in queue:
        client.request("l", "k", 30)
    eventually(lambda: waiters(holder, "k") == len(queue))
    server.signal(signal.SIGTERM)
    assert {client.line() for client in queue} == {"error_draining"}
    assert {client.line() for client in queue} == {""}
    assert holder.ask("r", "k", token) == "ok"
    assert server.wait() == 0


@takes_seconds
def test_d14_draining_ends_at_its_deadline(start_server: StartServer) -> None:
    server = start_server("--shutdown-timeout", "1")
    holder = server.connect()
    holder.lock("k", "0 600")
    begun = time.monotonic()
    server.signal(signal.SIGTERM)
    assert holder.line() == ""
    assert server.wait() == 0
    assert time.monotonic() - begun > 0.9


@takes_seconds
def test_d14_draining_without_a_deadline_ends_with_the_last_hold(start_server: StartServer) -> None:
    server = start_server("--shutdown-timeout", "0")
    expires, released, keeps = (server.connect() for _ in range(3))
    expires.lock("k", "0 1")
    token, third = released.lock("k2", "0 60"), keeps.lock("k3", "0 60")
    server.signal(signal.SIGTERM)
    server.wait_for_log("waiting for 3 connections")
    assert keeps.ask("r", "k2", token) == "ok"
    assert expires.line() == ""
    assert released.line() == ""
    assert keeps.ask("r", "k3", third) == "ok"
    assert server.wait() == 0


@pytest.mark.parametrize("how", ["r", "n"])
def test_draining_ends_when_somebody_else_has_ended_the_last_hold(
    start_server: StartServer, how: str
) -> None:
    """Whatever the sweep: the holder's connection does not ask for anything itself."""
    server = start_server("--lease-sweep-interval", "3600", "--shutdown-timeout", "0")
    holder, other = server.connect(), server.connect()
    token, second = holder.lock("k", "0 600"), other.lock("k2", "0 600")
    server.signal(signal.SIGTERM)
    server.wait_for_log("waiting for 2 connections")
    if how == "n":
        assert other.ask("n", "k", token) == "ok 33"
    else:
        assert other.ask("r", "k", token) == "ok"
    assert holder.line() == ""
    assert other.ask("r", "k2", second) == "ok"
    if how == "n":
        assert other.ask("r", "k", token) == "ok"
    assert server.wait() == 0


def test_d14_a_second_signal_ends_at_once(start_server: StartServer) -> None:
    server = start_server()
    server.connect().lock("k", "0 60")
    server.signal(signal.SIGTERM)
    server.wait_for_log("waiting for 1 connections")
    server.signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM
