"""What nobody was told, nobody holds: a grant ends with the connection that has not heard of it."""

from __future__ import annotations

import pytest

from dflockd.table import Limits, LockTable, Peer, TokenIssuer
from dflockd.wire import (
    Acquire,
    Enqueue,
    Enqueued,
    Granted,
    How,
    Release,
    Renew,
    Request,
    Space,
    StableRef,
    Status,
    Wait,
)

LOCK = Space.LOCK

# Settings, whether the connection declares a ref, and how it ends.
OUTLIVING = [
    ({"auto_release": False}, False, {"clean": True}),
    ({}, True, {"clean": True}),
    ({"orphan_ttl": 30}, False, {"clean": False}),
    ({"orphan_ttl": 30, "orphan_all": True}, False, {"clean": True}),
    ({}, False, {"clean": False, "silent": True}),
]
outliving = pytest.mark.parametrize(("limits", "ref", "end"), OUTLIVING)


def table_of(limits: dict[str, int]) -> tuple[LockTable, Peer, bytes]:
    """A table and a lock that somebody holds."""
    table = LockTable(Limits(**limits), TokenIssuer(b"secret", 0), kept=True)
    holder = table.connect()
    ((_, reply),) = table.handle(holder, Acquire(LOCK, b"k", 1, 0, 30), 0.0)
    assert isinstance(reply, Granted)
    return table, holder, reply.token


def ask(table: LockTable, peer: Peer, request: Request) -> object:
    return dict(table.handle(peer, request, 1.0)).get(peer.id)


@outliving
def test_a_grant_that_nobody_was_told_ends_with_its_connection(
    limits: dict[str, int], ref: bool, end: dict[str, bool]
) -> None:
    table, holder, token = table_of(limits)
    peer, next_ = table.connect(), table.connect()
    if ref:
        ask(table, peer, StableRef(b"ref"))
    assert ask(table, peer, Enqueue(LOCK, b"k", 1, 30)) is Status.QUEUED
    assert ask(table, next_, Acquire(LOCK, b"k", 1, 9, 30)) is None
    ask(table, holder, Release(LOCK, b"k", token))
    assert peer.holds
    ((number, reply),) = table.disconnect(peer, 2.0, **end)
    assert (number, type(reply)) == (next_.id, Granted)


@outliving
@pytest.mark.parametrize("waits", [False, True])
def test_a_grant_that_somebody_was_told_is_as_it_was(
    limits: dict[str, int], ref: bool, end: dict[str, bool], waits: bool
) -> None:
    table, holder, token = table_of(limits)
    ask(table, holder, Release(LOCK, b"k", token))
    peer = table.connect()
    if ref:
        ask(table, peer, StableRef(b"ref"))
    assert isinstance(ask(table, peer, Enqueue(LOCK, b"k", 1, 30)), Enqueued)
    if waits:
        assert isinstance(ask(table, peer, Wait(LOCK, b"k", 5)), Granted)
    assert table.disconnect(peer, 2.0, **end) == []
    assert len(table) == 1


@outliving
def test_a_grant_whose_answer_was_not_sent_ends_with_its_connection(
    limits: dict[str, int], ref: bool, end: dict[str, bool]
) -> None:
    # The answers of a step go out in slices; a connection can end before its turn.
    table, holder, token = table_of(limits)
    peer, next_ = table.connect(), table.connect()
    if ref:
        ask(table, peer, StableRef(b"ref"))
    other = ask(table, peer, Acquire(LOCK, b"other", 1, 9, 30))
    assert isinstance(other, Granted)
    assert ask(table, peer, Acquire(LOCK, b"k", 1, 9, 30)) is None
    assert ask(table, next_, Acquire(LOCK, b"k", 1, 9, 30)) is None
    ask(table, holder, Release(LOCK, b"k", token))
    assert [n for n, _ in table.disconnect(peer, 2.0, told=False, **end)] == [next_.id]
    assert len(table) == 2  # the other it knew of
    assert [hold.fence for hold in table.changes or () if hold.ended] == [1, 1, 3, 3]


def test_only_the_answer_that_was_not_sent_counts() -> None:
    table, holder, token = table_of({"orphan_ttl": 30})
    peer = table.connect()
    assert ask(table, peer, Acquire(LOCK, b"k", 1, 9, 30)) is None
    ask(table, holder, Release(LOCK, b"k", token))
    ask(table, holder, Acquire(LOCK, b"other", 1, 0, 30))
    assert ask(table, peer, Acquire(LOCK, b"other", 1, 1, 30)) is None
    assert table.advance(2.0) == [(peer.id, Status.TIMEOUT)]
    table.disconnect(peer, 2.0, clean=False, told=False)  # it was the timeout
    assert b"k" in table._partition.spaces[LOCK]


@pytest.mark.parametrize("keep", [False, True])
def test_a_drain_does_not_wait_for_what_nobody_was_told(keep: bool) -> None:
    table, holder, token = table_of({})
    peer, waiter = table.connect(), table.connect()
    ask(table, peer, Enqueue(LOCK, b"k", 1, 30))
    assert ask(table, waiter, Acquire(LOCK, b"k", 1, 9, 30)) is None
    ask(table, holder, Release(LOCK, b"k", token))
    assert table.drain(2.0, keep=keep) == [(waiter.id, Status.DRAINING)]
    assert not peer.holds
    assert len(table) == 0


@pytest.mark.parametrize(("covers", "left"), [(False, 0), (True, 1)])
def test_orphans_of_a_connection_that_was_closed_wait_if_all_are_covered(
    covers: bool, left: int
) -> None:
    table, holder, token = table_of({"orphan_ttl": 5, "orphan_all": covers})
    table.disconnect(holder, 1.0, clean=True)
    assert len(table) == left
    if covers:
        assert table.next_deadline() == 6.0
        back = table.connect()
        assert type(ask(table, back, Renew(LOCK, b"k", token, 30))).__name__ == "Renewed"
        assert ask(table, back, Release(LOCK, b"k", token)) is Status.OK
        assert table.disconnect(back, 2.0, clean=True) == []


def test_an_orphan_that_is_detached_is_nobodys() -> None:
    table, holder, token = table_of({"orphan_ttl": 5, "orphan_all": True})
    ask(table, holder, Renew(LOCK, b"k", token, 60, How.DETACH))
    table.disconnect(holder, 1.0, clean=True)
    assert table.next_deadline() == 61.0
