"""Grants that come late in their lease: literal lines come in, times are made up."""

from __future__ import annotations

from typing import Any

import pytest

from dflockd import errors
from dflockd.client import operations
from dflockd.client.operations import REPLY_PATIENCE, Grant, TimedReply
from dflockd.wire import MAX_SECONDS
from tests.dflockd.client.operations_support import LEASED, LOCK, TOKEN, Played, granted

CONFIRM = b"renew\nkey\ntoken=%b how=confirm lease=%d\n"


@pytest.mark.parametrize("operation", [operations.acquire, operations.wait])
@pytest.mark.parametrize(
    ("waited", "confirmed"), [(0.0, False), (2.4, False), (2.6, True), (9.0, True), (900.0, True)]
)
def test_a_long_wait_is_followed_by_a_renewal(
    operation: Any, waited: float, confirmed: bool
) -> None:
    """Nobody can tell how much of that time the lease has been running."""
    grant = granted(10, received=100.0 + waited)
    if not confirmed:
        assert Played(operation(LEASED, 1000), grant).result == Grant(TOKEN, 10, 110.0)
        return
    renewed = TimedReply(b"ok 10", 1200.0, 1200.001)
    played = Played(operation(LEASED, 1000), grant, renewed)
    assert played.requests[1] == CONFIRM % (TOKEN, 10)
    assert played.sent[1].patience == REPLY_PATIENCE
    assert played.result == Grant(TOKEN, 10, 1210.0)


def test_the_renewal_of_a_late_grant_asks_for_what_was_granted() -> None:
    grant = granted(40, received=150.0)
    renewed = TimedReply(b"ok 40", 150.0, 150.001)
    played = Played(operations.acquire(LOCK, 100), grant, renewed)
    assert played.requests[1] == CONFIRM % (TOKEN, 40)


def test_a_late_grant_whose_lease_has_ended_is_not_believed() -> None:
    """Somebody else may hold the lock: back to the queue, for the time that is left."""
    played = Played(
        operations.acquire(LEASED, 60),
        granted(10, received=130.25),
        TimedReply(b"error_lease_expired", 130.25, 130.251),
        TimedReply(b"timeout", 130.25, 130.5),
        granted(10, sent=130.5, received=131.0),
    )
    assert played.requests[0] == b"l\nkey\n60 10\n"
    assert played.requests[2] == b"l\nkey\n0 10\n"
    assert played.requests[3] == b"l\nkey\n30 10\n"
    assert (played.sent[3].patience, played.sent[3].timeout_is_reply) == (29.5, True)
    assert played.result == Grant(TOKEN, 10, 140.5)


def test_late_grants_end_with_the_time_to_wait() -> None:
    played = Played(
        operations.acquire(LEASED, 20),
        granted(10, received=119.0),
        TimedReply(b"error_lease_expired", 119.0, 119.001),
        granted(10, sent=119.0, received=125.0),
        TimedReply(b"error_lease_expired", 125.0, 125.001),
        TimedReply(b"timeout", 125.0, 125.002),
    )
    assert played.requests[2] == b"l\nkey\n1 10\n"
    assert played.requests[4] == b"l\nkey\n0 10\n", "nobody has said yet that it is not free"
    assert played.result is None


def test_late_grants_without_a_time_to_wait_go_on() -> None:
    late = granted(10, received=10_000.0), TimedReply(b"error_lease_expired", 10_000.0, 10_000.001)
    played = Played(operations.acquire(LEASED, None), *late, *late, granted(10))
    assert played.requests[2] == played.requests[0] == b"l\nkey\n%d 10\n" % MAX_SECONDS
    assert played.result == Grant(TOKEN, 10, 110.0)


def test_a_late_renewal_of_a_late_grant_is_not_believed_either() -> None:
    """This process can be stopped at any time, so also while it makes sure."""
    played = Played(
        operations.acquire(LEASED, 60),
        granted(10, received=105.0),
        TimedReply(b"ok 10", 105.0, 115.0),  # the lease of this answer ends as it comes
        TimedReply(b"ok 10", 115.0, 118.0),
    )
    assert played.requests[1] == played.requests[2] == CONFIRM % (TOKEN, 10)
    assert played.result == Grant(TOKEN, 10, 125.0)


def test_a_late_grant_to_a_place_in_the_queue() -> None:
    """There is no other place to go back to."""
    ended = TimedReply(b"error_lease_expired", 130.0, 130.001)
    with pytest.raises(errors.LeaseExpiredError, match="'key' on host:6388"):
        Played(operations.wait(LEASED, 60), granted(10, received=130.0), ended)
    late = TimedReply(b"acquired %b 10" % TOKEN, 100.0, 130.0)
    with pytest.raises(errors.LeaseExpiredError):
        Played(operations.enqueue(LEASED), late, ended)


def test_a_slow_answer_to_enqueue_is_followed_by_a_renewal() -> None:
    late = TimedReply(b"acquired %b 10" % TOKEN, 100.0, 105.0)
    played = Played(operations.enqueue(LEASED), late, TimedReply(b"ok 10", 105.0, 105.1))
    assert played.result == Grant(TOKEN, 10, 115.0)
