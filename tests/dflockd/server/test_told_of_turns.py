"""Whoever wants to be told of the turn, over real sockets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dflockd.raw_server import RawClient, ServerProcess, StartServer, eventually, granted
from tests.dflockd.server.server_support import inspect, waiters


def told(line: str) -> str:
    """Return the ticket of a reply that must say that it is somebody's turn."""
    found = re.fullmatch("turn ([0-9a-f]{32})", line)
    assert found is not None, line
    return found[1]


def enqueue(client: RawClient, key: str, milliseconds: int = 60_000, limit: int = 1) -> str:
    return client.ask("enqueue", key, f"turn={milliseconds} limit={limit}")


def take_up(client: RawClient, key: str, ticket: str) -> str:
    return client.ask("acquire", key, f"timeout=0 ticket={ticket}")


def test_who_waits_is_told_and_whoever_has_the_ticket_holds(
    server: ServerProcess, alice: RawClient, bob: RawClient
) -> None:
    token = alice.lock("turn")
    assert enqueue(bob, "turn") == "queued"
    bob.request("w", "turn", 30)
    assert alice.ask("r", "turn", token) == "ok"
    ticket = told(bob.line())
    assert alice.ask("l", "turn", 0) == "timeout"
    report = inspect(alice, "turn")
    assert report["holders"] == []
    assert [waiter["told"] for waiter in report["waiters"]] == [True]
    slot = server.connect()
    granted(take_up(slot, "turn", ticket))
    assert bob.ask("w", "turn", 0) == "error_not_enqueued"
    bob.close()
    slot_closes = server.connect()
    assert slot_closes.ask("l", "turn", 0) == "timeout"
    slot.close()
    eventually(lambda: alice.ask("l", "turn", 0).startswith("ok "))


def test_a_free_lock_is_told_at_once_as_often_as_it_has_slots(
    server: ServerProcess, alice: RawClient, bob: RawClient
) -> None:
    tickets = [told(enqueue(client, "turns", limit=2)) for client in (alice, bob)]
    third = server.connect()
    assert enqueue(third, "turns", limit=2) == "queued"
    third.request("w", "turns", 30)
    eventually(lambda: waiters(alice, "turns") == 3)
    assert alice.ask("pass", "turns", tickets[0]) == "ok"
    told(third.line())
    assert alice.ask("w", "turns", 0) == "timeout"


def test_silence_delays_others_by_no_more_than_was_said(alice: RawClient, bob: RawClient) -> None:
    ticket = told(enqueue(alice, "silent", 200))
    granted(bob.ask("l", "silent", 10))
    assert take_up(alice, "silent", ticket) == "timeout"


def test_the_end_of_a_connection_gives_the_turn_on(
    server: ServerProcess, alice: RawClient, bob: RawClient
) -> None:
    ticket = told(enqueue(alice, "ended"))
    assert enqueue(bob, "ended") == "queued"
    bob.request("w", "ended", 30)
    alice.reset()
    told(bob.line())
    assert take_up(server.connect(), "ended", ticket) == "timeout"


def test_who_passed_is_told_again(server: ServerProcess, alice: RawClient, bob: RawClient) -> None:
    ticket = told(enqueue(alice, "again"))
    bob.request("l", "again", 30)
    eventually(lambda: waiters(server.connect(), "again") == 2)
    assert alice.ask("pass", "again", ticket) == "ok"
    token = granted(bob.line())
    alice.request("w", "again", 30)
    assert bob.ask("r", "again", token) == "ok"
    assert told(alice.line()) == ticket


def test_everything_in_one_piece_is_answered_in_order(alice: RawClient) -> None:
    alice.send(b"enqueue\npiece\nturn=9\nw\npiece\n5\npass\npiece\n00\nping\n_\n_\n")
    ticket = told(alice.line())
    assert told(alice.line()) == ticket
    assert [alice.line(), alice.line()] == ["error", "ok"]


@pytest.mark.parametrize("kept", [False, True])
def test_a_draining_server_ends_it(start_server: StartServer, tmp_path: Path, kept: bool) -> None:
    server = start_server(*(["--state-dir", str(tmp_path / "state")] if kept else []))
    holder, first, second = (server.connect() for _ in range(3))
    holder.lock("other")
    told(enqueue(first, "drained"))
    assert enqueue(second, "drained") == "queued"
    second.request("w", "drained", 30)
    eventually(lambda: waiters(holder, "drained") == 2)
    server.process.terminate()
    assert second.line() == "error_draining"
    assert first.line() == ""
    holder.close()
    assert server.process.wait(15) == 0


def test_a_journal_hears_of_it_when_it_is_held(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--state-dir", str(tmp_path))

    def recorded() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    first, second = server.connect(), server.connect()
    second.lock("before")
    eventually(lambda: any(b"before" in text for text in recorded().values()))
    before = recorded()
    ticket = told(enqueue(first, "turn"))
    for _ in range(20):
        assert first.ask("pass", "turn", ticket) == "ok"
        assert told(first.ask("w", "turn", 5)) == ticket
    assert recorded() == before
    granted(take_up(second, "turn", ticket))
    eventually(lambda: recorded() != before)
