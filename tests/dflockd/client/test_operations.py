"""Operations as pure generators: literal bytes go out, literal lines come in, times are made up."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from dflockd import errors
from dflockd.address import Address
from dflockd.client import operations
from dflockd.client.introduction import Introduction
from dflockd.client.operations import GRACE, Grant, Operation, Progress, TimedReply, about_server
from dflockd.wire import MAX_SECONDS, Owner, encode_map
from tests.dflockd.client.operations_support import (
    LEASED,
    LOCK,
    PUBLISHED,
    SEMAPHORE,
    TOKEN,
    Played,
    at_once,
    granted,
)

# The map.

MAP = {"num_shards": 2, "servers": ["a:1"], "shards": [0, -1], "epochs": [7, 0]}


def test_the_map_comes_packed_and_is_not_sent_twice() -> None:
    report = encode_map(MAP)
    first = Played(operations.shards(about_server("a:1")), at_once(b"ok " + report.packed.json))
    assert first.requests == [b"shards\n_\n_ zlib\n"]
    assert first.result == ([Address("a", 1)], [0, -1], [7, 0], report.version)
    again = Played(operations.shards(about_server("b:1"), first.result), at_once(b"ok"))
    assert again.requests == [b"shards\n_\n%b zlib\n" % report.version]
    assert again.result is first.result
    other = encode_map(MAP | {"epochs": [8, 0]})
    changed = Played(
        operations.shards(about_server("b:1"), first.result), at_once(b"ok " + other.packed.json)
    ).result
    assert (changed.epochs, changed.version) == ([8, 0], other.version)


@pytest.mark.parametrize("known", [None, operations.ShardReport([], [-1], [0])])
def test_the_same_as_nothing_is_no_answer(known: operations.ShardReport | None) -> None:
    with pytest.raises(errors.RefusedError, match="unexpected answer"):
        Played(operations.shards(about_server("a:1"), known), at_once(b"ok"))


# What is asked.

TASK = LOCK._replace(introduction=Introduction(b"a task", Owner(b"run", 2)))


@pytest.mark.parametrize(
    ("operation", "request_"),
    [
        (operations.acquire(LOCK, 10), b"l\nkey\n10\n"),
        (operations.acquire(LEASED, 0), b"l\nkey\n0 10\n"),
        (operations.acquire(LEASED, 0.2), b"l\nkey\n0 10\n"),
        (operations.acquire(LOCK, 9.98), b"l\nkey\n10\n"),
        (operations.acquire(LOCK, None), b"l\nkey\n%d\n" % MAX_SECONDS),
        (operations.acquire(SEMAPHORE, 5), b"acquire\nkey\ntimeout=5 limit=3 lease=10\n"),
        (operations.acquire(PUBLISHED, 5), b"sl\nkey\n5 3 10\n"),
        (operations.acquire(PUBLISHED._replace(lease=None), 5), b"sl\nkey\n5 3\n"),
        (
            operations.acquire(TASK, 5),
            b"acquire\nkey\ntimeout=5 owner=run attempt=2 label=a task\n",
        ),
        (operations.acquire(TASK.knowing(frozenset()), 5), b"l\nkey\n5\n"),
        (operations.enqueue(LOCK), b"e\nkey\n\n"),
        (operations.enqueue(LEASED), b"e\nkey\n10\n"),
        (operations.enqueue(SEMAPHORE), b"enqueue\nkey\nlimit=3 lease=10\n"),
        (operations.enqueue(PUBLISHED), b"se\nkey\n3 10\n"),
        (operations.line_up(LOCK, 500), b"enqueue\nkey\nturn=500\n"),
        (operations.wait(LOCK, 5), b"w\nkey\n5\n"),
        (operations.wait(SEMAPHORE, 1), b"w\nkey\n1\n"),
        (operations.wait(PUBLISHED, 1), b"sw\nkey\n1\n"),
        (operations.renew(LOCK, TOKEN, 33), b"n\nkey\n%b 33\n" % TOKEN),
        (operations.renew(SEMAPHORE, TOKEN, 7), b"n\nkey\n%b 7\n" % TOKEN),
        (operations.renew(PUBLISHED, TOKEN, 7), b"sn\nkey\n%b 7\n" % TOKEN),
        (
            operations.renew(TASK, TOKEN, 7),
            b"renew\nkey\ntoken=%b lease=7 owner=run attempt=2 label=a task\n" % TOKEN,
        ),
        (
            operations.confirm(TASK, TOKEN, 7),
            b"renew\nkey\ntoken=%b how=confirm lease=7 label=a task\n" % TOKEN,
        ),
        (operations.confirm(PUBLISHED, TOKEN, 7), b"sn\nkey\n%b 7\n" % TOKEN),
        (operations.release(LOCK, TOKEN), b"r\nkey\n%b\n" % TOKEN),
        (operations.release(SEMAPHORE, TOKEN), b"r\nkey\n%b\n" % TOKEN),
        (operations.release(PUBLISHED, TOKEN), b"sr\nkey\n%b\n" % TOKEN),
        (operations.authenticate(b"secret", "host:6388"), b"auth\n_\nsecret\n"),
    ],
)
def test_requests(operation: Operation[Any], request_: bytes) -> None:
    assert next(operation).request == request_


@pytest.mark.parametrize("operation", [operations.acquire, operations.wait])
@pytest.mark.parametrize(
    ("timeout", "patience"),
    [
        (0, GRACE),
        (10, 10 + GRACE),
        (10.0, 10 + GRACE),
        (9.98, 10 + GRACE),
        (None, None),
        (MAX_SECONDS, MAX_SECONDS + GRACE),
    ],
)
def test_whole_seconds_are_the_servers_to_count(
    operation: Any, timeout: float | None, patience: float | None
) -> None:
    """What is no answer within them is a fault: nobody has said that the lock is somebody else's."""
    exchange = next(operation(LOCK, timeout))
    assert (exchange.patience, exchange.timeout_is_reply) == (patience, False)
    assert exchange.waits is (timeout != 0)


@pytest.mark.parametrize(("timeout", "asked"), [(0.3, 1), (9.5, 10)])
def test_seconds_that_the_wire_does_not_know_are_cut_off(timeout: float, asked: int) -> None:
    """Once a server has said that the lock is somebody else's, and not before."""
    began, ended = TimedReply(b"timeout", 100.0, 100.125), TimedReply(b"timeout", 100.2, 101.0)
    played = Played(operations.acquire(LOCK, timeout), began, ended)
    assert played.requests == [b"l\nkey\n0\n", b"l\nkey\n%d\n" % asked]
    first, second = played.sent
    assert (first.patience, first.timeout_is_reply, first.waits) == (GRACE, False, False)
    assert (second.patience, second.timeout_is_reply) == (timeout - 0.125, True)
    assert second.waits
    assert played.result is None


def test_a_free_lock_takes_one_request_whatever_the_time() -> None:
    played = Played(operations.acquire(LEASED, 9.5), granted(10))
    assert played.requests == [b"l\nkey\n0 10\n"]
    assert played.result == Grant(TOKEN, 10, 110.0)


def test_who_is_queued_asks_for_a_sign_of_life_before_that() -> None:
    """It was told that the lock is not free, but that may be long ago."""
    alive, ended = TimedReply(b"ok", 100.0, 100.125), TimedReply(b"timeout", 100.2, 109.0)
    played = Played(operations.wait(LOCK, 9.5), alive, ended)
    assert played.requests == [b"ping\n_\n_\n", b"w\nkey\n10\n"]
    first, second = played.sent
    assert (first.patience, first.timeout_is_reply, first.waits) == (9.5 + GRACE, False, False)
    assert (second.patience, second.timeout_is_reply) == (9.5 - 0.125, True)
    assert played.result is None


def test_a_place_in_the_queue_is_not_given_up_for_an_attempt() -> None:
    target = LOCK._replace(progress=Progress(place=b"p1"))
    exchange = next(operations.acquire(target, 9.5))
    assert exchange.request == b"acquire\nkey\ntimeout=10 ticket=p1\n"
    assert (exchange.patience, exchange.timeout_is_reply) == (10 + GRACE, False)


# What comes of it.


@pytest.mark.parametrize("operation", [operations.acquire, operations.wait])
def test_a_grant(operation: Any) -> None:
    played = Played(operation(LEASED, 5), granted(10))
    # The lease counts from before the request left.
    assert played.result == Grant(TOKEN, 10, 110.0)
    assert len(played.sent) == 1


def test_an_enqueued_grant() -> None:
    played = Played(operations.enqueue(LEASED), at_once(b"acquired %b 10" % TOKEN))
    assert played.result == Grant(TOKEN, 10, 110.0)


@pytest.mark.parametrize(
    "played",
    [
        Played(operations.acquire(LOCK, 5), at_once(b"timeout")),
        Played(operations.wait(LOCK, 5), at_once(b"timeout")),
        Played(operations.enqueue(LOCK), at_once(b"queued")),
        Played(operations.renew(LOCK, TOKEN, 33), at_once(b"error")),
        Played(operations.renew(LOCK, TOKEN, 33), at_once(b"error_lease_expired")),
        # A server that rounds down: no time is left at all.
        Played(operations.renew(LOCK, TOKEN, 1), at_once(b"ok 0")),
    ],
)
def test_nothing(played: Played) -> None:
    assert played.result is None


def test_a_renewal() -> None:
    answer = TimedReply(b"ok 20", 50.0, 58.0)
    assert Played(operations.renew(LOCK, TOKEN, 20), answer).result == Grant(TOKEN, 20, 70.0)


@pytest.mark.parametrize(
    ("line", "released"), [(b"ok", True), (b"error", False), (b"error_lease_expired", False)]
)
def test_a_release(line: bytes, released: bool) -> None:
    assert Played(operations.release(LOCK, TOKEN), at_once(line)).result is released


# Refusals.


OPERATIONS = {
    "acquire": lambda: operations.acquire(LOCK, 5),
    "enqueue": lambda: operations.enqueue(LOCK),
    "wait": lambda: operations.wait(LOCK, 5),
    "renew": lambda: operations.renew(LOCK, TOKEN, 33),
    "release": lambda: operations.release(LOCK, TOKEN),
}


def test_only_who_asks_for_a_slot_can_have_a_rival_of_his_name() -> None:
    """Elsewhere it comes from something that is out of order, and the connection is closed."""
    for name in ("renew", "release"):
        with pytest.raises(errors.RefusedError) as caught:
            Played(OPERATIONS[name](), at_once(b"error_owner waiting 3"))
        assert type(caught.value) is errors.RefusedError


@pytest.mark.parametrize("name", ["acquire", "enqueue", "wait"])
def test_another_attempt_of_the_owner(name: str) -> None:
    with pytest.raises(errors.OwnerConflictError, match="attempt 3 of the same owner") as caught:
        Played(OPERATIONS[name](), at_once(b"error_owner waiting 3"))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.state, again.attempt, again.key) == ("waiting", 3, "key")


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    ("line", "cls", "text"),
    [
        (b"error_auth", errors.AuthRefusedError, "auth_token"),
        (b"error_max_locks", errors.MaxLocksError, "--max-locks"),
        (b"error_max_waiters", errors.MaxWaitersError, "--max-waiters"),
        (b"error_max_holds", errors.MaxHoldsError, "--max-holds"),
        (b"error_limit_mismatch", errors.LimitMismatchError, "another limit than 1"),
        (b"error_not_enqueued", errors.LeaseExpiredError, "lease ended"),
        (b"error_already_enqueued", errors.RefusedError, ""),
        (b"error_draining", errors.DrainingError, "shutting down"),
    ],
)
def test_refusals(name: str, line: bytes, cls: type[errors.RefusedError], text: str) -> None:
    with pytest.raises(errors.RefusedError, match="lock 'key' on host:6388") as caught:
        Played(OPERATIONS[name](), at_once(line))
    assert type(caught.value) is cls
    assert text in str(caught.value)
    assert (caught.value.key, caught.value.server) == ("key", "host:6388")


@pytest.mark.parametrize("name", ["acquire", "enqueue", "wait"])
@pytest.mark.parametrize(
    ("line", "cls"),
    [(b"error", errors.RefusedError), (b"error_lease_expired", errors.LeaseExpiredError)],
)
def test_refused_grants(name: str, line: bytes, cls: type[errors.RefusedError]) -> None:
    with pytest.raises(errors.RefusedError) as caught:
        Played(OPERATIONS[name](), at_once(line))
    assert type(caught.value) is cls


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    "line",
    [b"", b"OK", b"ok ", b"ok 1 2 3", b"ok -1", b"yes", b"error_", b"error_moved", b"\xff", b" ok"],
)
def test_lines_that_are_no_reply(name: str, line: bytes) -> None:
    with pytest.raises(errors.BadReplyError, match=r"host:6388.*is a dflockd server listening"):
        Played(OPERATIONS[name](), at_once(line))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("acquire", b"queued"),
        ("acquire", b"ok"),
        ("acquire", b"acquired %b 33" % TOKEN),
        ("enqueue", b"timeout"),
        ("enqueue", b"ok %b 33" % TOKEN),
        ("wait", b"queued"),
        ("renew", b"ok"),
        ("renew", b"ok %b 33" % TOKEN),
        ("renew", b"timeout"),
        ("release", b"ok 33"),
        ("release", b"timeout"),
        ("release", b"queued"),
    ],
)
def test_replies_to_something_else(name: str, line: bytes) -> None:
    with pytest.raises(errors.BadReplyError):
        Played(OPERATIONS[name](), at_once(line))


def test_auth() -> None:
    assert Played(operations.authenticate(b"secret", "host:1"), at_once(b"ok")).result is None
    for line, cls, text in (
        (b"error_auth", errors.AuthRefusedError, "refused the auth token"),
        (b"error", errors.AuthRefusedError, "takes no auth token: remove yours"),
        (b"error_draining", errors.DrainingError, "server host:1"),
        (b"yes", errors.BadReplyError, "server host:1"),
    ):
        with pytest.raises(cls, match=text) as caught:
            Played(operations.authenticate(b"secret", "host:1"), at_once(line))
        assert "secret" not in str(caught.value)
        assert (caught.value.key, caught.value.server) == (None, "host:1")
