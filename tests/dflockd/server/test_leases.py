"""Time: read timeouts, leases, renewals, fences."""

from __future__ import annotations

import signal
import time

import pytest

from dflockd.wire import fence_from_token
from tests.dflockd.raw_server import RawClient, ServerProcess, StartServer, granted
from tests.dflockd.server.server_support import queue_up, takes_seconds


@takes_seconds
def test_d3_a_silent_holder_keeps_its_lock(alice: RawClient, bob: RawClient) -> None:
    # D3: the read timeout (here 1 second) ran between requests too, and cut off holders at work.
    token = alice.lock("silent", "0 30")
    assert bob.ask("l", "silent", 2) == "timeout"
    assert alice.ask("n", "silent", f"{token} 30") == "ok 30"


@takes_seconds
def test_d3_the_read_timeout_runs_inside_a_request(
    server: ServerProcess, alice: RawClient, bob: RawClient
) -> None:
    alice.lock("cut", "0 600")
    begun = time.monotonic()
    alice.send(b"n\ncut\n")
    assert alice.line() == "error"
    assert time.monotonic() - begun > 0.9
    assert alice.line() == ""
    granted(bob.ask("l", "cut", 25))


@takes_seconds
def test_d3_each_request_has_its_own_read_timeout(alice: RawClient) -> None:
    # Every piece ends inside a request, so that one is always begun, but none takes long.
    alice.send(b"ping\n_\n")
    end = time.monotonic() + 1.6
    while time.monotonic() < end:
        alice.send(b"_\nping\n_\n")
        assert alice.line() == "ok"
        time.sleep(0.1)


@takes_seconds
def test_d4_a_grant_that_races_with_a_timeout_is_not_lost(start_server: StartServer) -> None:
    # D4: release and timeout in one turn of the loop: granted in the table, "timeout" to the client.
    server = start_server()
    alice, carol = server.connect(), server.connect()
    keys = [f"k{number}" for number in range(20)]
    tokens = {key: alice.lock(key, "0 30") for key in keys}
    queue = {key: queue_up(server, carol, key, "1 30") for key in keys}
    server.suspend()
    alice.send("".join(f"r\n{key}\n{tokens[key]}\n" for key in keys).encode())
    time.sleep(1.1)  # both are overdue when the process goes on
    server.signal(signal.SIGCONT)
    for key in keys:
        assert alice.line() == "ok"
        answer = queue[key].line()
        if answer != "timeout":
            assert queue[key].ask("r", key, granted(answer)) == "ok"
        carol.lock(key)


@takes_seconds
def test_d7_a_lease_ends_on_time_whatever_the_sweep(start_server: StartServer) -> None:
    # D7: an expired lock stayed taken until the next sweep.
    server = start_server("--lease-sweep-interval", "600")
    alice, bob = server.connect(), server.connect()
    begun = time.monotonic()
    token = alice.lock("k", "0 1")
    granted(bob.ask("l", "k", 25))
    assert time.monotonic() - begun > 0.99
    assert alice.ask("n", "k", token) == "error"
    assert alice.ask("r", "k", token) == "error"


@pytest.mark.parametrize("seconds", [1, 33, 60])
def test_d8_renewal_answers_the_lease_just_set(alice: RawClient, seconds: int) -> None:
    # D8: it answered what was left, rounded down: 0 for a lease of 1, and clients gave up.
    token = alice.lock(f"renew{seconds}", "0 30")
    assert alice.ask("n", f"renew{seconds}", f"{token} {seconds}") == f"ok {seconds}"


def test_d8_renewal_without_a_lease_sets_the_default(alice: RawClient) -> None:
    token = alice.lock("renew", "0 5")
    assert alice.ask("n", "renew", token) == "ok 33"


def test_d20_a_renewal_takes_the_hold_over(
    server: ServerProcess, alice: RawClient, bob: RawClient
) -> None:
    # D20: another connection could renew for minutes and lose the lock with the first one's end.
    token = alice.lock("over", "0 30")
    assert bob.ask("n", "over", f"{token} 30") == "ok 30"
    alice.close()
    carol = queue_up(server, bob, "over", 30)
    assert bob.ask("n", "over", token) == "ok 33"
    bob.close()
    granted(carol.line())


def test_d22_d25_fences_grow_over_keys_and_restarts(start_server: StartServer) -> None:
    # D22: tokens were random. D25: a restart forgot everything; fences at least go on growing.
    fences = []
    for _ in range(2):
        server = start_server()
        client = server.connect()
        for key in ("a", "b", "a"):
            token = client.lock(key)
            fences.append(fence_from_token(token))
            assert client.ask("r", key, token) == "ok"
        fences.append(fence_from_token(granted(client.ask("sl", "a", "0 2"))))
        server.signal(signal.SIGTERM)
        client.close()
        assert server.wait() == 0
    assert fences == sorted(set(fences))
