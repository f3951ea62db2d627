"""What connections say of who asks, and what servers make of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dflockd import errors
from dflockd.client import abilities, clock, introduction, operations
from dflockd.client.introduction import ANONYMOUS, Introduction
from dflockd.client.operations import Progress, Target
from dflockd.sync_client import DistributedLock
from dflockd.wire import (
    Acquire,
    Label,
    Owner,
    Renew,
    RequestReader,
    Resume,
    Space,
    Status,
    Turn,
)
from tests.dflockd.client_support import Client, Face, client_named, soon, until, waiters
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import ServerProcess
from tests.dflockd.scripted_server import Last, ScriptedServer

pytestmark = pytest.mark.usefixtures("no_idle_connections")


@pytest.fixture(params=["sync", "asyncio"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    with client_named(request.param) as client:
        yield client


def run(face: Face, server: Any, **options: Any) -> Any:
    servers = [("127.0.0.1", server.port)]
    return face.module.DistributedLock("key", servers=servers, **options)


def said(server: ScriptedServer) -> list[Any]:
    return [
        request if not isinstance(request, Owner) else request._replace(instance=b"")
        for request in server.asked(Label, Owner, Acquire)
    ]


# What is said.


def test_a_connection_says_what_it_has_not_said_before(
    face: Face, scripted: ScriptedServer
) -> None:
    acquire = Acquire(0, b"key", 1, 10, None)  # type: ignore[arg-type]
    whole = [
        ({}, []),
        ({"owner": ("one", 0)}, [Label(b""), Owner(b"one", 0)]),
        ({"owner": ("one", 0)}, []),
        # The server knows owners, so that one request will do.
        ({"owner": ("one", 1), "label": "me"}, [Owner(b"one", 1, b"", b"me")]),
        ({"owner": ("one", 1), "label": "you"}, [Label(b"you")]),
        ({"owner": ("one", 2), "label": "you"}, [Owner(b"one", 2, b"", b"you")]),
        ({"label": "you"}, [Owner(b"", 0, b"", b"you")]),
        ({}, [Label(b"")]),
        ({"owner": ("one", 1), "label": "_"}, [Label(b"_"), Owner(b"one", 1)]),
        ({"owner": ("two", 1)}, [Owner(b"two", 1, b"", b"")]),
    ]
    expected: list[Any] = []
    for options, ahead in whole:
        lock = run(face, scripted, **options)
        assert face.do(lock.acquire()) is True
        assert face.do(lock.release()) is True
        expected += [*ahead, acquire]
        assert said(scripted) == expected
    assert scripted.accepted == 1


def test_a_connection_knows_its_server_for_as_long_as_it_is_there(
    face: Face, scripted: ScriptedServer
) -> None:
    """What is remembered of servers ends; this one is the same until the connection ends."""
    expected: list[Any] = []
    acquire = Acquire(0, b"key", 1, 10, None)  # type: ignore[arg-type]
    for attempt, ahead in enumerate(
        ([Label(b"me"), Owner(b"one", 0)], [Owner(b"one", 1, b"", b"me")])
    ):
        abilities.forget_all()
        lock = run(face, scripted, owner=("one", attempt), label="me")
        assert face.do(lock.acquire()) is True
        assert face.do(lock.release()) is True
        expected += [*ahead, acquire]
        assert said(scripted) == expected
    assert scripted.accepted == 1


def test_it_names_the_process_which_a_fork_is_not(scripted: ScriptedServer) -> None:
    who = Introduction(b"me", Owner(b"run", 3))
    [owner] = who.after(ANONYMOUS, True).requests
    assert who.after(ANONYMOUS, True).requests == (owner,)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, who.after(ANONYMOUS, True).requests[0])
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reading, 1000)
    for each in (reading, writing):
        os.close(each)
    assert theirs != owner
    (mine, instance), (other, other_instance) = (
        line.splitlines()[2].rsplit(b" ", 1) for line in (owner, theirs)
    )
    assert mine == other == b"run 3"
    assert len(instance) == len(other_instance) == 16


def test_a_rescue_says_it_as_well(scripted: ScriptedServer) -> None:
    """A server that has forgotten the hold takes from there whose it is."""
    lock = run_lock(scripted, owner=("run", 3), label="me")
    with lock:
        scripted.cut()
        scripted.wait_asked(Renew)
        lock.check()
    number = next(number for number, request in scripted.requests if isinstance(request, Renew))
    [owner] = [r for n, r in scripted.requests if n == number and isinstance(r, Owner)]
    assert owner._replace(instance=b"") == Owner(b"run", 3, b"", b"me")


def run_lock(server: Any, **options: Any) -> DistributedLock:
    return DistributedLock("key", servers=[("127.0.0.1", server.port)], **options)


# What a server makes of it.


@pytest.mark.parametrize("limit", [1, 2])
async def test_a_run_that_is_sent_twice(
    client: Client, server: ServerProcess, key: str, limit: int
) -> None:
    """It is answered at once, whatever the limit, and a later attempt waits."""

    def run(attempt: int, name: str = "run") -> Any:
        if limit == 1:
            return client.lock(key, server, owner=(name, attempt))
        return client.semaphore(key, limit, server, owner=(name, attempt))

    first = run(1)
    assert await soon(first.acquire()) is True
    for attempt in (0, 1):
        again = run(attempt)
        with pytest.raises(errors.OwnerConflictError, match="attempt 1 of the same owner is held"):
            await soon(again.acquire())
        assert (again.state, again.held) == ("free", False)
    other, later = run(0, "other"), run(2)
    if limit == 2:
        assert await soon(other.acquire()) is True
    assert await soon(later.enqueue()) == "queued"
    introduction.forget_instance()  # as if another process asked
    with pytest.raises(errors.OwnerConflictError) as caught:
        await soon(run(2).acquire())
    assert (caught.value.state, caught.value.attempt, caught.value.key) == ("waiting", 2, key)
    assert await soon(first.release()) is True
    assert await soon(later.wait(10)) is True
    assert await soon(later.release()) is True
    assert limit == 1 or await soon(other.release()) is True


async def test_the_same_process_goes_on_in_its_own_position(
    client: Client, server: ServerProcess, key: str
) -> None:
    """Its connection is lost, and the server has not noticed yet."""
    proxy = Proxy(server.port)
    try:
        holder = client.lock(key, server)
        lost = client.lock(key, proxy, owner=("run", 1))
        behind, again = client.lock(key, server), client.lock(key, server, owner=("run", 1))
        assert await soon(holder.acquire()) is True
        assert await soon(lost.enqueue()) == "queued"
        assert await soon(behind.enqueue()) == "queued"
        proxy.swallow()
        assert await soon(again.enqueue()) == "queued"
        await until(lambda: waiters(server, key) == 2)
        assert await soon(holder.release()) is True
        assert await soon(again.wait(10)) is True
        assert await soon(again.release()) is True
        assert await soon(behind.wait(10)) is True
        assert await soon(behind.release()) is True
    finally:
        proxy.close()


async def test_who_was_displaced_is_told(client: Client, server: ServerProcess, key: str) -> None:
    holder = client.lock(key, server)
    first, again = (client.lock(key, server, owner=("run", 1)) for _ in range(2))
    assert await soon(holder.acquire()) is True
    assert await soon(first.enqueue()) == "queued"
    assert await soon(again.enqueue()) == "queued"
    with pytest.raises(errors.DflockdError) as caught:
        await soon(first.wait(10))
    assert isinstance(caught.value, errors.OwnerConflictError | errors.LeaseExpiredError)
    assert first.state == "free"
    assert await soon(holder.release()) is True
    assert await soon(again.wait(10)) is True
    assert await soon(again.release()) is True


# Servers that are too old.


def old(server: ScriptedServer) -> None:
    """Up to 1.8.0 they answer what they do not know, and then hang up."""
    for kind in (Label, Owner):
        server.script(kind, Last(b"error\n"))


def test_an_old_server_is_told_nothing_after_the_first_time(
    face: Face, scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    old(scripted)
    for options in ({"label": "me"}, {"owner": ("run", 1)}, {"owner": ("run", 2), "label": "me"}):
        lock = run(face, scripted, **options)
        assert face.do(lock.acquire()) is True
        assert face.do(lock.release()) is True
    assert scripted.accepted == 2
    assert scripted.asked(Label, Owner) == [Label(b"me")]
    # Later it may be another one.
    now = clock.now()
    later = SimpleNamespace(now=lambda: now + abilities.REMEMBERED)
    monkeypatch.setattr(abilities, "clock", later)  # not the clock of the thread that renews
    scripted.cut()
    scripted.script(Label, Status.OK)
    lock = run(face, scripted, label="me")
    assert face.do(lock.acquire()) is True
    assert scripted.asked(Label, Owner) == [Label(b"me")] * 2
    assert face.do(lock.release()) is True


def test_one_that_knows_labels_alone(
    face: Face, scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of 0.1. It is told of owners once in a while, and never loses a label."""
    scripted.script(Owner, Status.ERROR)
    expected: list[Any] = []

    def use(ahead: list[Any], **options: Any) -> None:
        lock = run(face, scripted, **options)
        assert face.do(lock.acquire()) is True
        assert face.do(lock.release()) is True
        expected.extend([*ahead, Acquire(0, b"key", 1, 10, None)])  # type: ignore[arg-type]
        assert said(scripted) == expected

    use([Label(b"me"), Owner(b"one", 1)], owner=("one", 1), label="me")
    use([Label(b"you")], owner=("two", 1), label="you")
    use([], owner=("three", 1), label="you")
    use([], label="you")
    # Later it may be another one.
    now = clock.now()
    later = SimpleNamespace(now=lambda: now + abilities.REMEMBERED)
    monkeypatch.setattr(abilities, "clock", later)  # not the clock of the thread that renews
    scripted.script(Owner, Status.OK)
    scripted.cut()
    use([Label(b"me"), Owner(b"one", 1)], owner=("one", 1), label="me")
    use([Owner(b"two", 1, b"", b"you")], owner=("two", 1), label="you")
    # And that one the old one again: this is noticed at once.
    scripted.script(Owner, Status.ERROR)
    use([Owner(b"three", 1, b"", b"you")], owner=("three", 1), label="you")
    use([Label(b"me")], owner=("one", 1), label="me")


def test_a_lock_is_renewed_at_an_old_server(scripted: ScriptedServer) -> None:
    old(scripted)
    with run_lock(scripted, label="me") as lock:
        assert lock.renew()
        scripted.cut()
        scripted.wait_asked(Renew, 2)
        lock.check()


def test_one_that_ends_in_the_middle_is_not_old(scripted: ScriptedServer) -> None:
    """One of 0.1 refuses owners as well, but not labels; and it may be restarted as a new one."""
    scripted.script(Owner, Status.ERROR)
    scripted.script(Acquire, Last(b""))
    with pytest.raises(errors.UnreachableError):
        run_lock(scripted, owner=("run", 1), label="me").acquire()
    assert abilities.knows(scripted.address, abilities.EXTENSIONS) is None


def test_an_owner_is_the_last_of_what_is_said_ahead() -> None:
    """Its reply tells whether the server knows owners, and that of the last one is remembered."""
    opening = Introduction(b"", Owner(b"run", 1)).after(ANONYMOUS, None)
    target = Target(Space.LOCK, b"key", 1, 30, "here", says=opening, progress=Progress(b"ticket"))
    for operation in (
        operations.acquire(target, 1),
        operations.line_up(target, Turn(10), knows_turns=True),
    ):
        exchange = next(operation)
        assert exchange.has_owner
        reader = RequestReader()
        reader.receive(exchange.request)
        kinds = [type(reader.next_request()) for _ in range(exchange.ahead + 1)]
        assert kinds[-2] is Owner
        assert kinds[0] in (Resume, Turn)
        assert set(kinds) >= {Label, Resume}
