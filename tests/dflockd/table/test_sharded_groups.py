"""Groups at a key whose shard moves: they go on with the turn that was next."""

from __future__ import annotations

import pytest

from dflockd.cluster import snapshot as snapshots
from dflockd.wire import (
    Acquire,
    Enqueue,
    FairGroup,
    Granted,
    Moved,
    Release,
    Reserve,
    Space,
    TimedOut,
    Wait,
    YourTurn,
)
from tests.dflockd.table.sharded_support import AWAY, FOR_LONG, ask, forget_all, table_of
from tests.dflockd.table.turns_support import asks, process

LOCK = Space.LOCK


class Move:
    """A key of two slots at one server, then at another; who has come to it by name."""

    def __init__(self) -> None:
        self.table = self.old = table_of()
        self.new = table_of(FOR_LONG, 1)
        self.names: dict[int, str] = {}
        self.tokens: dict[str, bytes] = {}
        self.order: list[str] = []

    def come(self, name: str, limit: int = 0, ticket: bytes = b"") -> None:
        peer = self.table.connect()
        self.names[peer.id] = name
        group = None
        if not ticket and not name.startswith("-"):
            group = FairGroup(name.partition("-")[0].encode(), limit)
        request = Acquire(LOCK, b"a", 2, 600, 600, group=group, ticket=ticket)
        self.hear(self.table.handle(peer, request, 0))

    def hear(self, effects) -> None:  # type: ignore[no-untyped-def]
        for number, reply in effects:
            if isinstance(reply, Granted):
                self.order.append(self.names[number])
                self.tokens[self.names[number]] = reply.token

    def end(self, name: str) -> None:
        peer, token = self.table.connect(), self.tokens.pop(name)
        self.hear(self.table.handle(peer, Release(LOCK, b"a", token), 0))

    def move(self) -> None:
        """All that wait go on at the other server, in the opposite order."""
        text = snapshots.dump(self.old.freeze(0, 0), 7, 0)
        effects, _ = self.old.drop(0, AWAY)
        self.new.open(0, 2 << 40)
        self.new.load(0, snapshots.load(text, 7, 0), 0)
        self.table, names, self.names = self.new, self.names, {}
        for number, reply in reversed(effects):
            assert isinstance(reply, Moved)
            self.come(names[number], ticket=reply.ticket)

    def drain(self) -> list[str]:
        before = len(self.order)
        while self.tokens:
            self.end(next(iter(self.tokens)))
        return self.order[before:]


NAMES = ["a-1", "b-1", "a-2", "a-3", "a-4", "b-2", "-1", "c-1", "c-2", "-2"]


@pytest.mark.parametrize("ended", range(5))
def test_the_turns_are_the_same_as_without_the_move(ended: int) -> None:
    stayed, moved = Move(), Move()
    for story in (stayed, moved):
        for name in NAMES:
            story.come(name)
        for _ in range(ended):
            story.end(next(iter(story.tokens)))
    moved.move()
    assert moved.drain() == stayed.drain()
    forget_all(moved.new)


def test_holders_count_for_the_limit_of_their_group_after_the_move() -> None:
    move = Move()
    for name in ("a-1", "a-2", "b-1", "a-3"):
        move.come(name, limit=1)
    assert move.order == ["a-1", "b-1"]
    move.move()
    move.end("b-1")
    assert move.order == ["a-1", "b-1"]
    move.come("c-1")
    move.end("a-1")
    assert move.order[2:] == ["c-1", "a-2"]


def test_the_latest_limit_of_a_group_goes_along() -> None:
    move = Move()
    for name, limit in (("a-1", 1), ("b-1", 0), ("a-2", 1), ("a-3", 2)):
        move.come(name, limit)
    move.move()
    move.end("b-1")
    assert move.order == ["a-1", "b-1", "a-2"]


def test_a_position_that_is_kept_stays_in_its_group() -> None:
    move = Move()
    for name in ("-1", "-2"):
        move.come(name)
    peer = move.old.connect()
    ask(move.old, peer, Enqueue(LOCK, b"a", 2, 60, group=FairGroup(b"a")))
    kept = ask(move.old, peer, Wait(LOCK, b"a", 0, Reserve(60_000, 0)))
    assert isinstance(kept, TimedOut)
    for name in ("a-1", "a-2", "b-1"):
        move.come(name)
    move.move()
    move.come("a-0", ticket=kept.ticket)
    assert move.drain() == ["a-0", "b-1", "a-1", "a-2"]


def test_who_was_told_of_a_turn_has_the_slot_of_its_group() -> None:
    move = Move()
    peer = process(move.old)
    ask(move.old, peer, Enqueue(LOCK, b"a", 2, 60, group=FairGroup(b"a", 1), turn=5000))
    told = asks(move.old, peer)[1]
    assert isinstance(told, YourTurn)
    move.come("a-2", limit=1)
    move.move()
    move.come("b-1")
    assert move.order == ["b-1"]
    move.come("a-1", ticket=told.ticket)
    assert move.order == ["b-1", "a-1"]
