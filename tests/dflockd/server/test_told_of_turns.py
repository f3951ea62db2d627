"""Whoever wants to be told of the turn, over real sockets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dflockd.raw_server import RawClient, ServerProcess, StartServer, eventually, granted
from tests.dflockd.server.server_support import inspect, waiters


def named(line: str, word: str = "turn") -> str:
    """Return the ticket of a reply that must name one."""
    found = re.fullmatch(f"{word} ([0-9a-f]{{32}})", line)
    assert found is not None, line
    return found[1]


def of(server: ServerProcess, instance: str) -> RawClient:
    """A connection of a process."""
    client = server.connect()
    assert client.ask("hello", instance, "version=1").startswith("hello ok")
    return client


def enqueue(client: RawClient, key: str, milliseconds: int = 60_000, limit: int = 1) -> str:
    return named(client.ask("enqueue", key, f"turn={milliseconds} limit={limit}"), "queued")


def told(server: ServerProcess, key: str, milliseconds: int = 60_000) -> tuple[RawClient, str]:
    """Somebody whose turn it is, and the ticket."""
    client = of(server, key)
    ticket = enqueue(client, key, milliseconds)
    assert named(of(server, key).ask("next", "_", "_")) == ticket
    return client, ticket


def take_up(client: RawClient, key: str, ticket: str) -> str:
    return client.ask("acquire", key, f"timeout=0 ticket={ticket}")


def test_who_asks_is_told_and_whoever_has_the_ticket_holds(
    server: ServerProcess, alice: RawClient
) -> None:
    token = alice.lock("turn")
    bob, asking = of(server, "bob"), of(server, "bob")
    ticket = enqueue(bob, "turn")
    bob.request("wait", "turn", "timeout=30")
    asking.request("next", "_", "_")
    assert alice.ask("r", "turn", token) == "ok"
    assert named(asking.line()) == ticket
    assert alice.ask("l", "turn", 0) == "timeout"
    report = inspect(alice, "turn")
    assert report["holders"] == []
    assert [waiter["told"] for waiter in report["waiters"]] == [True]
    slot = server.connect()
    granted(take_up(slot, "turn", ticket))
    assert bob.line() == "error_not_enqueued"
    bob.close()
    slot_closes = server.connect()
    assert slot_closes.ask("l", "turn", 0) == "timeout"
    slot.close()
    eventually(lambda: alice.ask("l", "turn", 0).startswith("ok "))


def test_a_lock_is_told_as_often_as_it_has_slots(server: ServerProcess) -> None:
    tickets = [enqueue(of(server, "here"), "turns", limit=2) for _ in range(3)]
    asking = of(server, "here")
    assert [named(asking.ask("next", "_", "_")) for _ in range(2)] == tickets[:2]
    asking.request("next", "_", "_")
    assert server.connect().ask("pass", "turns", tickets[0]) == "ok"
    assert named(asking.line()) == tickets[0]


def test_silence_delays_others_by_no_more_than_was_said(
    server: ServerProcess, bob: RawClient
) -> None:
    alice, ticket = told(server, "silent", 200)
    granted(bob.ask("l", "silent", 10))
    assert take_up(alice, "silent", ticket) == "timeout"


def test_the_end_of_a_connection_gives_the_turn_on(server: ServerProcess, bob: RawClient) -> None:
    alice, ticket = told(server, "ended")
    bob.request("l", "ended", 30)
    eventually(lambda: waiters(server.connect(), "ended") == 2)
    alice.reset()
    granted(bob.line())
    assert take_up(server.connect(), "ended", ticket) == "timeout"


def test_what_could_not_be_used_is_told_again(server: ServerProcess, bob: RawClient) -> None:
    alice, ticket = told(server, "again")
    alice.request("wait", "again", "timeout=30")
    bob.request("l", "again", 30)
    eventually(lambda: waiters(server.connect(), "again") == 2)
    assert server.connect().ask("pass", "again", ticket) == "ok"
    token = granted(bob.line())
    asking = of(server, "again")
    asking.request("next", "_", "_")
    assert bob.ask("r", "again", token) == "ok"
    assert named(asking.line()) == ticket


def test_everything_in_one_piece_is_answered_in_order(server: ServerProcess) -> None:
    alice = of(server, "piece")
    alice.send(b"enqueue\npiece\nturn=9\nnext\n_\n_\npass\npiece\n00\nping\n_\n_\n")
    ticket = named(alice.line(), "queued")
    assert named(alice.line()) == ticket
    assert [alice.line(), alice.line()] == ["error", "ok"]


@pytest.mark.parametrize("kept", [False, True])
def test_a_draining_server_ends_it(start_server: StartServer, tmp_path: Path, kept: bool) -> None:
    server = start_server(*(["--state-dir", str(tmp_path / "state")] if kept else []))
    holder, first, second = (server.connect() for _ in range(3))
    holder.lock("other")
    for client in (first, second):
        assert client.ask("hello", "here", "version=1").startswith("hello ok")
        enqueue(client, "drained")
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
    _, ticket = told(server, "turn")
    asking = of(server, "turn")
    for _ in range(20):
        assert first.ask("pass", "turn", ticket) == "ok"
        assert named(asking.ask("next", "_", "_")) == ticket
    assert recorded() == before
    granted(take_up(second, "turn", ticket))
    eventually(lambda: recorded() != before)
