"""What nobody was told, nobody holds: a grant ends with the connection that has not heard of it."""

from __future__ import annotations

import pytest

from dflockd.table import Limits, LockTable, Peer, TokenIssuer
from dflockd.wire import (
    Acquire,
    Granted,
    Release,
    Request,
    Space,
    StableRef,
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
