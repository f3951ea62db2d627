"""Pending acquires at servers that are restarted, that send them elsewhere, or that are too old."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflockd import errors
from dflockd.client import pending
from dflockd.sync_client import DistributedLock
from dflockd.wire import Enqueue, Hello, Next, Queued, Recovering, Wait, Welcome, YourTurn
from examples.demo.stage import LockServer
from tests.dflockd.client.crowd import PATIENCE, Crowd, take_up
from tests.dflockd.scripted_server import Last, ScriptedCluster, ScriptedServer, Silence


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[LockServer]:
    with LockServer(tmp_path) as server:
        yield server


def test_after_a_restart_they_queue_in_the_order_of_before(restarted: LockServer) -> None:
    crowd = Crowd(restarted)
    with crowd.lock("restart"):
        crowd.line_up("restart", 20, timeout=None)
        restarted.kill()
        late = crowd.join(crowd.lock("restart"), timeout=None)
        restarted.start()
        for number in range(21):
            crowd.pending.ask()
            while (told := crowd.told.get(timeout=PATIENCE))[0] == "queued":
                pass
            assert told == ("told", number, None)
            crowd.everybody[number].leave()
    assert late.number == 20
    crowd.pending.close()


def test_after_a_restart_who_was_told_is_told_again(restarted: LockServer) -> None:
    """Unless its ticket was handed over: two would ask for one run then."""
    crowd = Crowd(restarted)
    told, handed = crowd.join(crowd.lock("told")), crowd.join(crowd.lock("handed"))
    assert [crowd.hear("queued"), crowd.hear("queued")] == [(0, None), (1, None)]
    crowd.hear_told(0)
    crowd.hear_told(1)
    before = told.ticket
    old = handed.hand_over()
    restarted.kill()
    restarted.start()
    crowd.hear_told(0)
    assert told.ticket != before
    # The handed one is forgotten here, so that nobody is in the way of who comes with its ticket.
    lock = crowd.lock("handed")
    assert not lock.inspect()["waiters"]
    assert lock.enqueue(old) == "acquired"
    assert lock.release()
    crowd.hear_nothing()
    handed.leave()
    take_up(told, crowd.lock("told")).release()
    crowd.pending.close()


def test_a_server_that_stays_away(restarted: LockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits there is told so, after a while and all together."""
    monkeypatch.setattr(pending, "RESTART_PATIENCE", 0.5)
    crowd = Crowd(restarted)
    holder = crowd.lock("away")
    holder.acquire()
    told: list[Any] = []
    crowd.line_up("away", 3, timeout=None)
    restarted.kill()
    told = [crowd.hear("ended") for _ in range(3)]
    assert [number for number, _ in told] == [0, 1, 2]
    assert all(isinstance(error, errors.UnreachableError) for _, error in told)
    crowd.hear_nothing()
    crowd.pending.close()
    holder.release()


@pytest.fixture
def cluster() -> Iterator[ScriptedCluster]:
    cluster = ScriptedCluster()
    yield cluster
    cluster.stop()


@pytest.mark.parametrize("recovers", [False, True])
def test_in_a_cluster_a_position_goes_where_its_key_goes(
    cluster: ScriptedCluster, recovers: bool
) -> None:
    key = "account:7"
    first, second = cluster.servers
    first.script(Enqueue, Queued(b"7ticket7"))
    first.script(Wait, cluster.moved(key, 1, 8, place="7ticket7"))
    second.script(Enqueue, *([Recovering(50)] if recovers else []), Queued(b"8ticket8"))
    second.script(Wait, Silence)
    second.script(Next, YourTurn(b"8ticket8"), Silence)
    crowd = Crowd(None)
    acquire = crowd.join(DistributedLock(key, None, 10, cluster.seeds))
    assert crowd.hear("queued") == (0, None)
    crowd.hear_told(0)
    assert {request.ticket for request in second.asked(Enqueue)} == {b"7ticket7"}
    assert acquire.hand_over() == "8ticket8"
    acquire.leave()
    crowd.pending.close()


def test_in_a_cluster_a_turn_goes_where_its_key_goes(cluster: ScriptedCluster) -> None:
    """Its server sends it on; or ends, and another has taken its place."""
    key = "account:7"
    first, second = cluster.servers
    moves = threading.Event()

    def sent_on(_: object) -> object:
        assert moves.wait(PATIENCE)
        return cluster.moved(key, 1, 8)

    first.script(Enqueue, Queued(b"1ticket1"))
    first.script(Next, YourTurn(b"1ticket1"), Silence)
    first.script(Wait, sent_on)
    second.script(Enqueue, Queued(b"2ticket2"))
    second.script(Next, YourTurn(b"2ticket2"), Silence)
    second.script(Wait, Silence)
    crowd = Crowd(None)
    acquire = crowd.join(DistributedLock(key, None, 10, cluster.seeds))
    crowd.hear("queued")
    crowd.hear_told(0)
    moves.set()
    crowd.hear_told(0)
    assert acquire.ticket == "2ticket2"
    assert [request.ticket for request in second.asked(Enqueue)] == [b"1ticket1"]
    is_back = threading.Event()

    def back(_: object) -> object:
        is_back.set()
        return Queued(b"3ticket3")

    def turn(_: object) -> object:
        # The first server is asked as soon as it can be reached again, before the position is there.
        assert is_back.wait(PATIENCE)
        return YourTurn(b"3ticket3")

    first.script(Enqueue, back)
    first.script(Next, turn, Silence)
    first.script(Wait, Silence)
    first.cut()
    cluster.is_at(0, 9)
    second.stop()
    crowd.hear_told(0)
    assert acquire.ticket == "3ticket3"
    assert [request.ticket for request in first.asked(Enqueue)] == [b"", b"2ticket2"]
    crowd.pending.close()


# Servers that are too old.


@pytest.mark.parametrize("hello", [Welcome(b"0.1.0", frozenset({b"slots"})), Last(b"error\n")])
def test_a_server_that_knows_no_turns_is_asked_for_nothing(
    scripted: ScriptedServer, hello: Any
) -> None:
    """It would grant the lock."""
    scripted.script(Hello, hello)
    crowd = Crowd(None)
    for number in range(3):
        crowd.join(DistributedLock("key", servers=[str(scripted)], label="me"))
        told, error = crowd.hear("ended")
        assert told == number
        assert isinstance(error, errors.UnsupportedError)
        assert error.key == "key"
    assert not scripted.asked()
    assert DistributedLock("key", servers=[str(scripted)]).acquire()
    crowd.pending.close()
