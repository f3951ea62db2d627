"""The server as its clients see it: real processes, raw sockets, on uvloop and on plain asyncio.

D1 to D28 are defects of the first dflockd server; each test says what the defect was.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from dflockd.server.server import SLICE
from dflockd.wire import fence_from_token
from tests.dflockd.raw_server import (
    PATIENCE,
    RawClient,
    ServerProcess,
    StartServer,
    eventually,
    granted,
)


def stats(client: RawClient) -> dict[str, Any]:
    reply = client.ask("stats")
    assert reply.startswith("ok {")
    report: dict[str, Any] = json.loads(reply[3:])
    return report


def inspect(client: RawClient, key: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(client.ask("i", key).removeprefix("ok "))
    return report


def waiters(client: RawClient, key: str) -> int:
    return sum(row["waiters"] for row in stats(client)["locks"] if row["key"] == key)


def queue_up(server: ServerProcess, watcher: RawClient, key: str, argument: object) -> RawClient:
    """Return a client whose `l` waits at the server by now."""
    before = waiters(watcher, key)
    client = server.connect()
    client.request("l", key, argument)
    eventually(lambda: waiters(watcher, key) == before + 1)
    return client


@pytest.fixture
def alice(server: ServerProcess) -> RawClient:
    return server.connect()


@pytest.fixture
def bob(server: ServerProcess) -> RawClient:
    return server.connect()


# Plain use.


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


# Requests in a row.


def test_pipelined_requests_are_answered_in_order(alice: RawClient) -> None:
    alice.send(b"l\npipe\n0\nping\n_\n_\nl\npipe\n0\nx\n\n\n")
    granted(alice.line())
    assert [alice.line() for _ in range(3)] == ["ok", "timeout", "error"]


def test_requests_behind_a_waiting_one_wait_too(alice: RawClient, bob: RawClient) -> None:
    token = alice.lock("behind")
    bob.send(b"l\nbehind\n30\nping\n_\n_\npi")
    # The rest of the last one may take its time while bob waits: the read timeout is 1 second.
    assert alice.ask("l", "behind", 2) == "timeout"
    assert alice.ask("r", "behind", token) == "ok"
    granted(bob.line())
    assert bob.line() == "ok"
    bob.send(b"ng\n_\n_\n")
    assert bob.line() == "ok"


@pytest.mark.parametrize("at_once", [True, False])
def test_more_than_4_kib_behind_a_waiting_request_is_too_much(
    server: ServerProcess, alice: RawClient, at_once: bool
) -> None:
    key = f"flood-{at_once}"
    token = alice.lock(key)
    if at_once:
        flooder = server.connect()
        flooder.send(f"l\n{key}\n30\n".encode() + b"ping\n_\n_\n" * 600)
    else:
        flooder = queue_up(server, alice, key, 30)
        flooder.send(b"ping\n_\n_\n" * 600)
    assert flooder.line() == "error"
    assert flooder.line() == ""
    assert waiters(alice, key) == 0
    assert alice.ask("r", key, token) == "ok"


def test_4_kib_behind_a_waiting_request_is_fine(server: ServerProcess, alice: RawClient) -> None:
    token = alice.lock("some")
    waiter = queue_up(server, alice, "some", 30)
    waiter.send(b"ping\n_\n_\n" * 400)
    assert alice.ask("r", "some", token) == "ok"
    granted(waiter.line())
    assert {waiter.line() for _ in range(400)} == {"ok"}


# The defects.


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


def test_d2_documented_variables_count_and_others_do_not(start_server: StartServer) -> None:
    # D2: five variables were looked up under a wrong name, so the documented one had no effect.
    server = start_server(
        env={"DFLOCKD_MAX_LOCKS": "1", "DFLOCKD_DEFAULT_LEASE_TTL_S": "5", "MAX_LOCKS": "7"}
    )
    client = server.connect()
    assert client.ask("l", "k1", 0).endswith(" 5")
    assert client.ask("l", "k2", 0) == "error_max_locks"


def test_d3_a_silent_holder_keeps_its_lock(alice: RawClient, bob: RawClient) -> None:
    # D3: the read timeout (here 1 second) ran between requests too, and cut off holders at work.
    token = alice.lock("silent", "0 30")
    assert bob.ask("l", "silent", 2) == "timeout"
    assert alice.ask("n", "silent", f"{token} 30") == "ok 30"


def test_d3_the_read_timeout_runs_inside_a_request(
    server: ServerProcess, alice: RawClient, bob: RawClient
) -> None:
    alice.lock("cut", "0 30")
    begun = time.monotonic()
    alice.send(b"n\ncut\n")
    assert alice.line() == "error"
    assert 0.9 < time.monotonic() - begun < PATIENCE
    assert alice.line() == ""
    granted(bob.ask("l", "cut", 5))


def test_d3_each_request_has_its_own_read_timeout(alice: RawClient) -> None:
    # Every piece ends inside a request, so that one is always begun, but none takes long.
    alice.send(b"ping\n_\n")
    end = time.monotonic() + 1.6
    while time.monotonic() < end:
        alice.send(b"_\nping\n_\n")
        assert alice.line() == "ok"
        time.sleep(0.1)


def test_d4_a_grant_that_races_with_a_timeout_is_not_lost(start_server: StartServer) -> None:
    # D4: release and timeout in one turn of the loop: granted in the table, "timeout" to the client.
    server = start_server()
    alice, carol = server.connect(), server.connect()
    keys = [f"k{number}" for number in range(20)]
    tokens = {key: alice.lock(key, "0 30") for key in keys}
    queue = {key: queue_up(server, carol, key, "1 30") for key in keys}
    server.signal(signal.SIGSTOP)
    alice.send("".join(f"r\n{key}\n{tokens[key]}\n" for key in keys).encode())
    time.sleep(1.1)  # both are overdue when the process goes on
    server.signal(signal.SIGCONT)
    for key in keys:
        assert alice.line() == "ok"
        answer = queue[key].line()
        if answer != "timeout":
            assert queue[key].ask("r", key, granted(answer)) == "ok"
        carol.lock(key)


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
        server.signal(signal.SIGSTOP)
        dead.close()
        alice.request("r", "k", token)
        server.signal(signal.SIGCONT)
        assert alice.line() == "ok"
        assert alive.ask("r", "k", granted(alive.line())) == "ok"


def test_d7_a_lease_ends_on_time_whatever_the_sweep(start_server: StartServer) -> None:
    # D7: an expired lock stayed taken until the next sweep.
    server = start_server("--lease-sweep-interval", "60")
    alice, bob = server.connect(), server.connect()
    token = alice.lock("k", "0 1")
    begun = time.monotonic()
    granted(bob.ask("l", "k", 10))
    assert 0.8 < time.monotonic() - begun < 3
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


def test_d9_any_bytes_are_answered(server: ServerProcess, alice: RawClient) -> None:
    # D9: long lines and bytes that are not UTF-8 ended the connection without an answer.
    alice.send(b"l\n\xff\xfe\n0\n")
    assert alice.line() == "error"
    alice.send(b"\0\n\0\n\0\n")
    assert alice.line() == "error"
    alice.send(b"l\n" + b"k" * 70_000 + b"\n0\n")
    assert alice.line() == "error"
    assert alice.line() == ""
    assert server.connect().ask("ping") == "ok"


@pytest.mark.parametrize(
    "bad", ["n\nkept-{}\n", "n\nkept-{}\ntoken abc\n", "x\n\n\n", "l\n\n0\n", "l\na b\n0\n"]
)
def test_d10_a_malformed_request_keeps_the_connection(
    alice: RawClient, bob: RawClient, bad: str
) -> None:
    # D10: any mistake ended the connection and so released every lock of the client.
    key = f"kept-{len(bad)}"
    token = alice.lock(key, "0 30")
    frame = bad.replace("kept-{}", key)
    alice.send(frame.encode() + b"\n" * (3 - frame.count("\n")))
    assert alice.line() == "error"
    assert bob.ask("l", key, 0) == "timeout"
    assert alice.ask("n", key, token) == "ok 33"


def test_d11_an_unfinished_request_is_not_executed(server: ServerProcess, alice: RawClient) -> None:
    # D11: the last line counted as complete when the connection ended.
    client = server.connect()
    client.send(b"l\ntruncated\n0 3")
    client.sock.shutdown(socket.SHUT_WR)
    assert client.line() == ""
    assert all(row["key"] != "truncated" for row in stats(alice)["locks"])


@pytest.mark.parametrize("number", ["1_0", "+5", "-1", "1.5", "٣", "9" * 120, "3601"])
def test_d12_numbers_are_strict_and_bounded(alice: RawClient, number: str) -> None:
    # D12: a lease of 120 digits locked a key for ever.
    assert alice.ask("l", "numbers", f"0 {number}") == "error"
    assert alice.ask("e", "numbers", number) == "error"
    token = alice.lock("numbers", "0 3600")
    assert alice.ask("n", "numbers", f"{token} {number}") == "error"
    assert alice.ask("r", "numbers", token) == "ok"


def test_d13_the_line_limit_counts_the_payload(alice: RawClient, bob: RawClient) -> None:
    # D13: the line feed counted, so keys of 256 bytes were refused.
    alice.lock("k" * 256)
    bob.send(b"l\r\n" + b"k" * 256 + b"\r\n0\r\n")
    assert bob.line() == "timeout"
    assert bob.ask("l", "k" * 257, 0) == "error"
    assert bob.line() == ""


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
    queue = [server.connect() for _ in range(2 * SLICE + 1)]
    for client in queue:
        client.request("l", "k", 30)
    eventually(lambda: waiters(holder, "k") == len(queue))
    server.signal(signal.SIGTERM)
    assert {client.line() for client in queue} == {"error_draining"}
    assert {client.line() for client in queue} == {""}
    assert holder.ask("r", "k", token) == "ok"
    assert server.wait() == 0


def test_d14_draining_ends_at_its_deadline(start_server: StartServer) -> None:
    server = start_server("--shutdown-timeout", "1")
    holder = server.connect()
    holder.lock("k", "0 600")
    begun = time.monotonic()
    server.signal(signal.SIGTERM)
    assert holder.line() == ""
    assert server.wait() == 0
    assert 0.9 < time.monotonic() - begun < 5


def test_d14_draining_without_a_deadline_ends_with_the_last_hold(
    start_server: StartServer,
) -> None:
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


def test_d14_a_second_signal_ends_at_once(start_server: StartServer) -> None:
    server = start_server()
    server.connect().lock("k", "0 60")
    server.signal(signal.SIGTERM)
    server.wait_for_log("waiting for 1 connections")
    server.signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM


def flood(client: RawClient, data: bytes) -> None:
    """Send until the other side takes no more."""
    client.sock.settimeout(0.3)
    with contextlib.suppress(TimeoutError):
        while True:
            client.send(data)


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


def test_d24_the_log_shows_no_keys_and_no_line_for_each_request(
    start_server: StartServer,
) -> None:
    # D24: a line for each request, with the key as it came.
    server = start_server()
    client = server.connect()
    client.lock("key\x1b[31m")
    before = len(server.log)
    for _ in range(10):
        client.ask("l", "key\x1b[31m", 0)
    assert client.ask("ping") == "ok"
    assert len(server.log) == before
    assert "key" not in "".join(server.log)


def test_d26_a_bad_variable_refuses_to_start(start_server: StartServer) -> None:
    # D26: it was silently ignored.
    server = start_server(env={"DFLOCKD_READ_TIMEOUT_S": "abc"})
    assert server.wait() == 2
    assert len(server.log) == 1


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


# What stands on a connection, and what outlives it.


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


# Who may come in.


@pytest.fixture
def guarded(start_server: StartServer, tmp_path: Path) -> ServerProcess:
    path = tmp_path / "secret"
    path.write_text("open sesame\n")
    return start_server("--auth-token-file", str(path))


def test_auth_right(guarded: ServerProcess) -> None:
    client = guarded.connect()
    assert client.ask("auth", "_", "open sesame") == "ok"
    client.lock("k")
    assert client.ask("auth", "_", "open sesame") == "ok"


@pytest.mark.parametrize(
    ("command", "argument"),
    [("auth", "open"), ("auth", ""), ("ping", "_"), ("l", "0"), ("stats", "_"), ("x", "")],
)
def test_auth_wrong_or_missing(guarded: ServerProcess, command: str, argument: str) -> None:
    client = guarded.connect()
    begun = time.monotonic()
    client.send(f"{command}\nk\n{argument}\nauth\n_\nopen sesame\nping\n_\n_\n".encode())
    assert client.line() == "error_auth"
    assert client.line() == ""
    assert time.monotonic() - begun > 0.09  # slows down guessing
    assert "sesame" not in "".join(guarded.log)


def test_auth_by_variable(start_server: StartServer) -> None:
    server = start_server(env={"DFLOCKD_AUTH_TOKEN": "s" * 65536})
    client = server.connect()
    assert client.ask("auth", "_", "s" * 65536) == "ok"
    assert server.connect().ask("ping") == "error_auth"


def test_auth_lost_frees_locks(guarded: ServerProcess) -> None:
    client, other = guarded.connect(), guarded.connect()
    assert other.ask("auth", "_", "open sesame") == "ok"
    assert client.ask("auth", "_", "open sesame") == "ok"
    client.lock("k", "0 60")
    assert client.ask("auth", "_", "wrong") == "error_auth"
    granted(other.ask("l", "k", 10))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an authority, and a server and a client certificate signed by it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not on PATH")
    where = tmp_path_factory.mktemp("tls")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=where, check=True, capture_output=True)

    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    new += ["-days", "1"]
    run(
        *new, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign",
    )  # fmt: skip
    for name in ("server", "client"):
        run(
            *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem",
            "-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1",
            "-addext", "basicConstraints=critical,CA:FALSE",
        )  # fmt: skip
    return where


def test_tls(start_server: StartServer, certificates: Path) -> None:
    server = start_server(
        "--tls-cert", str(certificates / "server.pem"),
        "--tls-key", str(certificates / "server.key"),
        "--orphan-ttl", "60",
    )  # fmt: skip
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    watcher, client = server.connect(context=context), server.connect(context=context)
    assert client.ask("ping") == "ok"
    client.lock("k", "0 60")
    waiter = server.connect(context=context)
    waiter.request("l", "k", 30)
    eventually(lambda: waiters(watcher, "k") == 1)
    assert isinstance(client.sock, ssl.SSLSocket)
    client.sock.unwrap().close()  # a clean end: nothing is orphaned
    granted(waiter.line())
    # Who does not speak TLS gets no further, and no lock.
    plain = server.connect()
    plain.request("l", "k2", 0)
    plain.sock.settimeout(PATIENCE)
    assert b"ok" not in plain.sock.recv(4096)
    assert "Traceback" not in "".join(server.log)
    server.signal(signal.SIGTERM)
    assert watcher.line() == ""


@pytest.mark.parametrize(("end", "orphaned"), [("close", False), ("reset", True)])
def test_tls_peers_that_leave_without_its_farewell(
    start_server: StartServer, certificates: Path, end: str, orphaned: bool
) -> None:
    """A process that is killed: its kernel closes the connection, and speaks no TLS."""
    server = start_server(
        "--tls-cert", str(certificates / "server.pem"),
        "--tls-key", str(certificates / "server.key"),
        "--orphan-ttl", "60",
    )  # fmt: skip
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    watcher, holder = server.connect(context=context), server.connect(context=context)
    holder.lock("k", "0 60")
    getattr(holder, end)()
    eventually(lambda: stats(watcher)["connections"] == 1)
    assert len(stats(watcher)["locks"]) == orphaned


def test_tls_client_certificates(start_server: StartServer, certificates: Path) -> None:
    server = start_server(
        "--tls-cert", str(certificates / "server.pem"),
        "--tls-key", str(certificates / "server.key"),
        "--tls-client-ca", str(certificates / "ca.pem"),
    )  # fmt: skip
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
        assert server.connect(context=context).ask("ping") == "ok"
    context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    assert server.connect(context=context).ask("ping") == "ok"
    assert "Traceback" not in "".join(server.log)


# Where it listens.


def test_unix_socket(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = start_server("--unix-socket", str(path))
    server.wait_for_log(f"unix:{path}")
    sock = socket.socket(socket.AF_UNIX)
    client = server.adopt(sock)
    sock.connect(str(path))
    client.lock("k")
    assert server.connect().ask("l", "k", 0) == "timeout"
    client.close()
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not path.exists()


def test_unix_socket_left_by_a_killed_server_is_no_obstacle(
    start_server: StartServer, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    for _ in range(2):
        server = start_server("--unix-socket", str(path))
        server.wait_for_log(f"unix:{path}")
        server.signal(signal.SIGKILL)
        server.wait()
    assert path.exists()


def test_a_file_in_place_of_the_unix_socket_is_left_alone(
    start_server: StartServer, tmp_path: Path
) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    server = start_server("--unix-socket", str(path))
    assert server.wait() == 1
    assert path.read_text() == "data"
    assert len(server.log) == 1
    assert str(path) in server.log[0]


@pytest.mark.parametrize("host", ["a..b", "192.0.2.1"])
def test_an_address_that_cannot_be_bound(start_server: StartServer, host: str) -> None:
    server = start_server("--host", host)
    assert server.wait() == 1
    assert len([line for line in server.log if "ERROR" in line]) == 1
    assert host in server.log[-1]
    assert "Traceback" not in "".join(server.log)


def test_two_servers_on_one_port(start_server: StartServer, server: ServerProcess) -> None:
    second = start_server("--port", str(server.port))
    assert second.wait() == 1
    assert len(second.log) == 1
    assert str(server.port) in second.log[0]
    assert server.connect().ask("ping") == "ok"
