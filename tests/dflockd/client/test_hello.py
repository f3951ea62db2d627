"""What a connection says first, and what is asked of servers that know more or less of it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflockd import __version__, errors
from dflockd.client import introduction
from dflockd.client.process import close_idle_connections
from dflockd.sync_client import DistributedLock
from dflockd.wire import (
    FEATURES,
    Acquire,
    Auth,
    Enqueue,
    FairGroup,
    Hello,
    Owner,
    Rate,
    Release,
    Renew,
    Space,
    Status,
    Unwelcome,
    Wait,
    Welcome,
)
from tests.dflockd.client.silence import GRACE, SLACK
from tests.dflockd.client_support import Client, Face, soon, until, waiters
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import PATIENCE, ServerProcess, StartServer
from tests.dflockd.scripted_server import Last, ScriptedCluster, ScriptedServer, Silence
from tests.dflockd.storage.recovery_support import Site, all_back, inspected
from tests.pace import Pace

pytestmark = pytest.mark.usefixtures("no_idle_connections")

WHO: dict[str, Any] = {"owner": ("run", 1), "label": "me"}


def lock_at(face: Face, server: Any, **options: Any) -> Any:
    servers = [("127.0.0.1", server.port)]
    return face.module.DistributedLock("key", servers=servers, **options)


def semaphore_at(face: Face, server: Any, **options: Any) -> Any:
    servers = [("127.0.0.1", server.port)]
    return face.module.DistributedSemaphore("key", 3, servers=servers, **options)


def use(face: Face, lock: Any) -> None:
    assert face.do(lock.acquire()) is True
    assert face.do(lock.release()) is True


def first_words(server: ScriptedServer) -> list[Any]:
    """What came first on each connection."""
    first: dict[int, Any] = {}
    for number, request in server.requests:
        first.setdefault(number, request)
    return list(first.values())


# What is said.


@pytest.mark.parametrize("secret", [None, "open sesame"])
def test_it_is_the_first_on_each_connection_and_on_none_twice(
    face: Face, scripted: ScriptedServer, secret: str | None
) -> None:
    shown = None if secret is None else secret.encode()
    hello = Hello(introduction.instance(), __version__.encode(), shown)
    for number in (1, 2):
        use(face, lock_at(face, scripted, auth_token=secret))
        use(face, lock_at(face, scripted, auth_token=secret, **WHO))
        scripted.cut()
        assert first_words(scripted) == scripted.asked(Hello) == [hello] * number
    assert not scripted.asked(Auth)


def test_a_request_says_all_that_it_is_about(face: Face, scripted: ScriptedServer) -> None:
    """And nothing of it is left for the next."""
    owner, group, rate = Owner(b"run", 1), FairGroup(b"tenant", 2), Rate(10, 60_000)
    full = semaphore_at(face, scripted, **WHO, group="tenant", group_limit=2, rate="10/m")
    use(face, full)
    use(face, lock_at(face, scripted))
    said = (Space.LOCK, b"key", 3, 10, None, rate, owner, b"me", group)
    plain = (Space.LOCK, b"key", 1, 10, None)
    assert scripted.asked(Acquire) == [Acquire(*said), Acquire(*plain)]  # type: ignore[arg-type]
    assert scripted.accepted == 1


def test_a_renewal_says_whose_the_hold_is_on_another_connection_alone(
    face: Face, scripted: ScriptedServer
) -> None:
    """A server that has forgotten it takes from there whose it is."""
    lock = lock_at(face, scripted, group="tenant", **WHO)
    assert face.do(lock.acquire())
    scripted.cut()
    scripted.wait_asked(Renew)
    face.do(lock.check())
    [renewal] = scripted.asked(Renew)
    said = (Owner(b"run", 1), b"me", FairGroup(b"tenant"))
    assert (renewal.owner, renewal.label, renewal.group) == said
    face.do(lock.release())


async def test_a_server_that_has_lost_all_learns_whose_a_hold_is(
    client: Client, tmp_path: Path
) -> None:
    site = Site(tmp_path / "state", "--default-lease-ttl", "6")
    try:
        options = {"lease_ttl_s": 6, "group": "tenant", "group_limit": 2, **WHO}
        lock = client.semaphore("key", 3, site.start(), **options)
        assert await lock.acquire()
        site.kill()
        site.change_boot()
        for path in site.path.glob("journal-*"):
            path.unlink()
        site.start("--state-recover")
        await all_back(site.server, lock)
        [holder] = inspected(site.connect(), "key")["holders"]
        said = {"label": "me", "owner": "run", "attempt": 1, "group": "tenant"}
        assert holder | said == holder
        assert holder["fence"] == lock.fence
        assert await lock.release()
    finally:
        site.end()


def test_a_fork_is_another_process(scripted: ScriptedServer) -> None:
    mine = introduction.instance()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, introduction.instance())
        os._exit(0)
    os.waitpid(child, 0)
    other = os.read(reading, 1000)
    for each in (reading, writing):
        os.close(each)
    assert other != mine == introduction.instance()
    assert len(other) == len(mine) == 16


# The secret.


@pytest.mark.parametrize(
    ("wanted", "shown", "text"),
    [
        ("sesame", "sesame-2", "refused the auth token: set the one that it was started with"),
        ("sesame", None, "requires an auth token: set auth_token"),
        (None, "sesame-2", "takes no auth token: remove yours"),
    ],
)
def test_a_secret_that_is_not_the_servers(
    face: Face, start: StartServer, wanted: str | None, shown: str | None, text: str
) -> None:
    server = start(*(() if wanted is None else ("--auth-token", wanted)))
    for ask in ("acquire", "enqueue", "draw_age"):
        lock = lock_at(face, server, auth_token=shown, **WHO)
        with pytest.raises(errors.AuthRefusedError, match=text) as caught:
            face.do(getattr(lock, ask)())
        assert isinstance(caught.value, PermissionError)
        assert caught.value.server == f"127.0.0.1:{server.port}"
        assert caught.value.server in str(caught.value)
        for shown_to_people in (str(caught.value), repr(lock), repr(lock._session.route)):
            assert "sesame" not in shown_to_people
            assert "\n" not in shown_to_people
        assert lock.state == "free"
    use(face, lock_at(face, server, auth_token=wanted))


# Published servers.


HANGS_UP = {Hello: (Last(b"error\n"),)}
STAYS = {Hello: (Status.ERROR,)}
WANTS_A_SECRET = {Hello: (Last(b"error_auth\n"),)}


@pytest.fixture(params=[HANGS_UP, STAYS, WANTS_A_SECRET], ids=["hangs up", "stays", "secret"])
def published(request: pytest.FixtureRequest, scripted: ScriptedServer) -> ScriptedServer:
    """A server that does not know `hello`, in one of the ways in which they answer that."""
    for kind, answers in request.param.items():
        scripted.script(kind, *answers)
    return scripted


def secret_for(server: ScriptedServer) -> dict[str, Any]:
    return {"auth_token": "secret"} if server._script[Hello] == [*WANTS_A_SECRET[Hello]] else {}


def test_a_published_server_has_locks_and_semaphores(face: Face, published: ScriptedServer) -> None:
    """Labels and owners, which it knows nothing of, are left out."""
    secret = secret_for(published)
    published.script(Enqueue, Status.QUEUED)
    published.script(Wait, Status.TIMEOUT)
    for make, space, limit in ((lock_at, Space.LOCK, 1), (semaphore_at, Space.SEMAPHORE, 3)):
        lock = make(face, published, **secret, **WHO)
        assert face.do(lock.acquire())
        assert face.do(lock.renew())
        assert face.do(lock.release())
        assert face.do(lock.enqueue()) == "queued"
        assert face.do(lock.wait(1)) is False
        assert published.asked(Acquire)[-1] == Acquire(space, b"key", limit, 10, None)
        assert published.asked(Enqueue)[-1] == Enqueue(space, b"key", limit, None)
        assert published.asked(Wait)[-1] == Wait(space, b"key", 1)
        assert [r.space for r in published.asked(Renew, Release)[-2:]] == [space] * 2
        assert published.asked(Renew)[-1].owner is None
    assert len(published.asked(Hello)) == 1
    assert published.asked(Auth) == ([Auth(b"secret")] if secret else [])
    assert published.accepted == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rate": "10/m"}, "rates: remove the rate"),
        ({"group": "tenant"}, "groups: remove the group 'tenant'"),
        ({"owner": ("run", 1, 7)}, "which task is the newest: use another"),
    ],
)
def test_it_is_asked_for_nothing_else(
    face: Face, published: ScriptedServer, options: dict[str, Any], text: str
) -> None:
    lock = lock_at(face, published, **secret_for(published), **options)
    for ask in (lock.acquire, lock.enqueue):
        with pytest.raises(errors.UnsupportedError, match=f"'key' on {published}: .*{text}"):
            face.do(ask())
        assert lock.state == "free"
    assert published.asked() == []


def test_nor_to_let_go_of_a_hold_or_for_an_age(face: Face, published: ScriptedServer) -> None:
    lock = lock_at(face, published, **secret_for(published))
    assert face.do(lock.acquire())
    for ask, text in ((lock.detach, "how to detach"), (lock.draw_age, "the newest")):
        with pytest.raises(errors.UnsupportedError, match=f"{published}: .*{text}"):
            face.do(ask())
    assert [type(request) for request in published.asked()] == [Acquire]


def test_a_published_server_whose_secret_is_missing_or_wrong(
    face: Face, scripted: ScriptedServer
) -> None:
    scripted.script(Hello, *WANTS_A_SECRET[Hello])
    scripted.script(Auth, Last(b"error_auth\n"))
    scripted.script(Acquire, Last(b"error_auth\n"))
    for secret, text in ((None, "set auth_token"), ("wrong", "refused the auth token")):
        with pytest.raises(errors.AuthRefusedError, match=text):
            face.do(lock_at(face, scripted, auth_token=secret).acquire())


@pytest.mark.parametrize("ends", ["cut", "closed"])
def test_another_server_in_its_place_is_asked_anew(
    face: Face, published: ScriptedServer, ends: str
) -> None:
    """Once a connection to the former has ended, whoever has ended it."""
    secret = secret_for(published)
    for _ in range(2):
        use(face, lock_at(face, published, **secret, **WHO))
    assert len(published.asked(Hello)) == 1
    published.script(Hello, Welcome(b"9.9", FEATURES))
    if ends == "cut":
        published.cut()
    else:
        close_idle_connections()
    use(face, lock_at(face, published, **secret, **WHO))
    assert len(published.asked(Hello)) == 2
    [owner] = [request.owner for request in published.asked(Acquire)[2:]]
    assert owner == Owner(b"run", 1)


def test_a_lock_is_renewed_at_the_server_in_its_place(
    face: Face, published: ScriptedServer
) -> None:
    lock = lock_at(face, published, **secret_for(published), **WHO)
    assert face.do(lock.acquire())
    published.script(Hello, Welcome(b"9.9", FEATURES))
    published.cut()
    published.wait_asked(Renew)
    face.do(lock.check())
    assert published.asked(Renew)[-1].owner == Owner(b"run", 1)
    assert face.do(lock.detach()) is not None
    assert len(published.asked(Hello)) == 2


# Servers of ours that lack something.


def test_a_server_that_lacks_a_feature_is_asked_for_the_others(
    face: Face, scripted: ScriptedServer
) -> None:
    scripted.script(Hello, Welcome(b"0.1.0", frozenset({b"slots", b"rates"})))
    use(face, semaphore_at(face, scripted, rate="10/m", **WHO))
    [asked] = scripted.asked(Acquire)
    assert (asked.rate, asked.owner, asked.label) == (Rate(10, 60_000), Owner(b"run", 1), b"me")
    for options in ({"group": "tenant"}, {"owner": ("run", 1, 7)}):
        with pytest.raises(errors.UnsupportedError, match=f"'key' on {scripted}: "):
            face.do(lock_at(face, scripted, **options).acquire())
    assert len(scripted.asked(Acquire)) == 1


def test_one_that_knows_more_is_asked_for_what_this_client_knows(
    face: Face, scripted: ScriptedServer
) -> None:
    scripted.script(Hello, Welcome(b"9.9", FEATURES | {b"teleports"}))
    use(face, lock_at(face, scripted, group="tenant", **WHO))
    assert scripted.accepted == 1


# What is no answer.


@pytest.mark.parametrize(
    "answer",
    [
        *(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"),
        *(
            b"-ERR unknown command\r\n",
            b"\xff\xfe\n",
            b"hello\n",
            b"queued\n",
            b"timeout\ntimeout\n",
        ),
        *(b"ok\n", b"ok token 33 more\n", b"ok 1 2\n"),
    ],
)
def test_an_answer_that_is_none(face: Face, scripted: ScriptedServer, answer: bytes) -> None:
    scripted.script(Hello, answer)
    lock = lock_at(face, scripted)
    with pytest.raises(errors.BadReplyError, match="is a dflockd server listening there") as caught:
        face.do(lock.acquire())
    assert str(scripted) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert lock.state == "free"
    scripted.script(Hello, Welcome(b"1.0", FEATURES))
    use(face, lock)


def test_one_that_refuses_it_for_another_reason(face: Face, scripted: ScriptedServer) -> None:
    for answer in (Status.DRAINING, Unwelcome(Status.DRAINING)):
        scripted.script(Hello, answer)
        with pytest.raises(errors.DrainingError, match=str(scripted)):
            face.do(lock_at(face, scripted).acquire())
    assert scripted.asked() == []


@pytest.mark.parametrize("timeout", [0, 1])
def test_a_server_that_says_nothing(face: Face, scripted: ScriptedServer, timeout: float) -> None:
    """It has the time for the lock, as it has for any other answer."""
    scripted.script(Hello, Silence)
    with Pace() as pace, pytest.raises(errors.UnreachableError, match="no answer in time"):
        face.do(lock_at(face, scripted, acquire_timeout_s=timeout).acquire())
    assert timeout + GRACE - 0.1 < pace.wall
    assert pace.seconds < timeout + GRACE + SLACK


def test_a_wait_for_hello_can_be_cancelled(scripted: ScriptedServer) -> None:
    scripted.script(Hello, Silence)
    lock = DistributedLock("key", None, servers=[scripted.address])
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(lock.acquire)
        scripted.wait_asked(Hello)
        lock.cancel()
        with pytest.raises(errors.AcquireCancelledError):
            waiting.result(PATIENCE)


@pytest.mark.parametrize("timeout", [0, 60])
def test_in_a_cluster_the_others_are_asked_after_a_second(face: Face, timeout: float) -> None:
    cluster = ScriptedCluster()
    try:
        first, second = cluster.servers
        use(face, face.module.DistributedLock("other", servers=cluster.seeds))
        first.script(Hello, Silence)
        first.cut()
        cluster.is_at(1, 8)
        lock = face.module.DistributedLock("key", timeout, servers=cluster.seeds)
        with Pace() as pace:
            use(face, lock)
        assert pace.seconds < 1 + SLACK
        assert lock.server == str(second)
    finally:
        cluster.stop()


# What a server makes of owners.


@pytest.mark.parametrize("limit", [1, 2])
async def test_a_run_that_is_sent_twice(
    client: Client, server: ServerProcess, key: str, limit: int
) -> None:
    """It is answered at once, whatever the limit, and a later attempt waits."""

    def run(attempt: int, name: str = "run") -> Any:
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
    # As if another process asked.
    introduction.forget_instance()
    close_idle_connections()
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
