"""The ends of connections, and what one may hold, at a real server."""

from __future__ import annotations

import signal

import pytest

from dflockd.table.limits import STEP
from tests.dflockd.raw_server import StartServer, eventually, granted
from tests.dflockd.server.server_support import takes_seconds

MANY = 240
"""More replies than a turn of the loop has time for."""


@pytest.mark.parametrize(
    "flags", [["--no-auto-release-on-disconnect"], ["--orphan-ttl", "60"], ["stable-ref"]], ids=str
)
def test_a_grant_that_nobody_was_told_blocks_nobody(
    start_server: StartServer, flags: list[str]
) -> None:
    ref = flags == ["stable-ref"]
    server = start_server(*([] if ref else flags))
    alice, bob, carol = server.connect(), server.connect(), server.connect()
    if ref:
        assert bob.ask("stable-ref", "bob") == "ok"
    token = alice.lock("k", "0 60")
    assert bob.ask("e", "k", "60") == "queued"
    carol.request("l", "k", "30 60")
    assert alice.ask("r", "k", token) == "ok"
    bob.reset()
    granted(carol.line())


def test_a_closed_connection_keeps_its_locks_for_a_renewal_where_all_are_covered(
    start_server: StartServer,
) -> None:
    server = start_server("--orphan-ttl", "60", "--orphan-ttl-covers", "all")
    alice, again, bob = server.connect(), server.connect(), server.connect()
    token, other = alice.lock("k", "0 60"), alice.lock("other", "0 60")
    assert alice.ask("r", "other", other) == "ok"
    alice.close()
    eventually(lambda: '"connections":2' in bob.ask("stats"))
    assert bob.ask("l", "other", 0).startswith("ok ")
    assert bob.ask("l", "k", 0) == "timeout"
    assert again.ask("n", "k", f"{token} 60") == "ok 60"
    assert again.ask("r", "k", token) == "ok"
    granted(bob.ask("l", "k", 0))


def test_one_connection_holds_no_more_than_it_may(start_server: StartServer) -> None:
    server = start_server("--max-holds", "2")
    alice, bob = server.connect(), server.connect()
    token = alice.lock("a")
    alice.lock("b")
    assert alice.ask("l", "c", 0) == "error_max_holds"
    assert alice.ask("e", "c", "") == "error_max_holds"
    bob.lock("c")
    assert alice.ask("r", "a", token) == "ok"
    alice.lock("d")


def test_one_semaphore_has_no_more_holders_than_it_may(start_server: StartServer) -> None:
    server = start_server("--max-holds", "2")
    alice, bob, carol = server.connect(), server.connect(), server.connect()
    for client in (alice, bob):
        granted(client.ask("sl", "k", "0 3"))
    assert carol.ask("sl", "k", "5 3") == "error_max_holds"
    assert carol.ask("se", "k", "3") == "error_max_holds"


@pytest.mark.parametrize("end", ["close", "reset"])
def test_all_locks_of_a_big_connection_are_free_in_the_end(
    start_server: StartServer, end: str
) -> None:
    many = 3 * STEP
    server = start_server("--max-locks", "10000")
    alice, bob = server.connect(), server.connect()
    for number in range(many):
        alice.lock(str(number), "0 60")
    bob.request("l", str(many - 1), "30 60")
    alice.reset() if end == "reset" else alice.close()
    granted(bob.line())
    for number in range(many - 1):
        granted(bob.ask("l", str(number), "5 60"))


@takes_seconds
def test_the_leases_of_many_locks_end_at_once(start_server: StartServer) -> None:
    many = 3 * STEP
    server = start_server("--max-locks", "10000")
    alice, bob = server.connect(), server.connect()
    for number in range(many):
        alice.lock(str(number), "0 1")
    eventually(lambda: '"locks":[]' in bob.ask("stats"))


def test_a_run_is_told_that_it_is_there(start_server: StartServer) -> None:
    server = start_server()
    first, again, retry, lost, back = (server.connect() for _ in range(5))
    token = granted(first.ask("acquire", "k", "timeout=0 owner=run lease=60"))
    assert again.ask("acquire", "k", "timeout=5 owner=run attempt=0") == "error_owner held 0"
    for client in (lost, back):
        assert client.ask("hello", "here", "version=1").startswith("hello ok ")
    lost.request("acquire", "k", "timeout=30 lease=60 owner=other attempt=2")
    eventually(lambda: '"waiters":1' in again.ask("stats"))
    assert retry.ask("enqueue", "k", "owner=run attempt=1") == "queued"
    assert again.ask("enqueue", "k", "owner=other attempt=2") == "error_owner waiting 2"
    assert back.ask("enqueue", "k", "owner=other attempt=2") == "queued"
    assert lost.line() == "error_owner waiting 2"
    assert first.ask("r", "k", token) == "ok"
    granted(back.ask("w", "k", "5"))
    assert again.ask("l", "k", "0") == "timeout"


@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_grant_that_could_not_be_sent_any_more_blocks_nobody(
    start_server: StartServer, end: str
) -> None:
    # The grants of one step go out in several turns of the loop. The server is stopped meanwhile, so
    # that it learns in the turn of the first that those who are to get the last ones are gone.
    server = start_server()
    number = MANY
    alice, bob = server.connect(), server.connect()
    waiters = [server.connect() for _ in range(number)]
    for key, waiter in enumerate(waiters):
        assert waiter.ask("stable-ref", str(key)) == "ok"
        alice.lock(str(key), "0 60")
        waiter.request("l", str(key), "50 60")
    eventually(lambda: bob.ask("stats").count('"waiters":1') == number)
    server.suspend()
    alice.close()
    for waiter in waiters[200:]:
        waiter.reset() if end == "reset" else waiter.close()
    server.signal(signal.SIGCONT)
    for key in range(200, number):
        granted(bob.ask("l", str(key), "10 60"))
