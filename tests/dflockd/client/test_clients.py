"""The public API of the lock clients. Every case runs with the blocking client and with asyncio."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflockd import errors
from dflockd.client import operations
from dflockd.client.process import close_idle_connections
from tests.dflockd.client_support import (
    Calls,
    Client,
    Proxy,
    client_named,
    is_free,
    left_of_lease,
    make_certificate,
    renewed,
    soon,
    stats,
    until,
    waiters,
)
from tests.dflockd.raw_server import PATIENCE, ServerProcess
from tests.pace import Pace

pytestmark = pytest.mark.usefixtures("no_idle_connections")

SECRET = "open-sesame-0123456789"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Shared by the tests of this module, which use different keys."""
    server = ServerProcess()
    yield server
    server.end()


# Taking and giving back.


async def test_with(client: Client, server: ServerProcess, key: str) -> None:
    async with client.lock(key, server) as lock:
        assert lock.held
        assert len(lock.token) == 32
        assert lock.lease == 33
        assert lock.fence == int(lock.token[:16], 16)
        assert not is_free(server, key)
        shown = repr(lock)
        assert lock.token not in shown
        assert f"{key!r} on 127.0.0.1:{server.port}, held" in shown
    assert (lock.held, lock.token, lock.lease, lock.fence) == (False, None, 0, None)
    assert f"{key!r} on 127.0.0.1:{server.port}, free" in repr(lock)
    assert is_free(server, key)


async def test_the_timeout_is_that_of_the_moment(
    client: Client, server: ServerProcess, key: str
) -> None:
    """Whoever sets it anew, on a lock like others that have been made, means that one."""
    async with client.lock(key, server, acquire_timeout_s=600):
        pass
    holder = client.lock(key, server, lease_ttl_s=600)
    lock = client.lock(key, server, acquire_timeout_s=600)
    assert await soon(holder.acquire()) is True
    itself = getattr(lock, "lock", lock)  # of one in threads
    itself.acquire_timeout_s = 0
    assert await soon(lock.acquire()) is False
    itself.acquire_timeout_s = None
    waiting = asyncio.ensure_future(lock.acquire())
    await until(lambda: waiters(server, key) == 1)
    assert await soon(holder.release()) is True
    assert await soon(waiting) is True
    assert await soon(lock.release()) is True


async def test_with_gives_back_when_the_body_fails(
    client: Client, server: ServerProcess, key: str
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.lock(key, server):
            raise ZeroDivisionError
    assert is_free(server, key)


async def test_acquire_and_release(client: Client, server: ServerProcess, key: str) -> None:
    lock = client.lock(key, server)
    assert await lock.acquire() is True
    assert not is_free(server, key)
    assert await lock.release() is True
    assert is_free(server, key)
    assert await lock.release() is False
    assert await lock.acquire() is True, "the object can be used again"
    assert await lock.release() is True


async def test_release_without_acquire(client: Client, server: ServerProcess, key: str) -> None:
    assert await client.lock(key, server).release() is False


async def test_not_reentrant(client: Client, server: ServerProcess, key: str) -> None:
    async with client.lock(key, server) as lock:
        for again in (lock.acquire, lock.enqueue, lock.__aenter__):
            with pytest.raises(errors.AlreadyHeldError, match=key) as caught:
                await again()
            assert caught.value.key == key
            assert lock.held
            assert not is_free(server, key), "the attempt must not end the first hold"
    assert is_free(server, key)


async def test_fences_grow(client: Client, server: ServerProcess, key: str) -> None:
    fences = []
    lock = client.lock(key, server)
    for _ in range(5):
        async with lock:
            fences.append(lock.fence)
    assert fences == sorted(set(fences))


async def test_locks_of_different_keys_do_not_meet(
    client: Client, server: ServerProcess, key: str
) -> None:
    async with client.lock(f"{key}-1", server), client.lock(f"{key}-2", server):
        pass


@pytest.mark.parametrize("wait", [0, 0.3, 1])
async def test_false_when_not_granted_in_time(
    client: Client, server: ServerProcess, key: str, wait: float
) -> None:
    async with client.lock(key, server):
        other = client.lock(key, server, acquire_timeout_s=wait)
        with Pace() as pace:
            assert await other.acquire() is False
        assert wait <= pace.wall
        assert pace.seconds < wait + 0.6, "not a whole number of seconds"
        assert not other.held
        await until(lambda: waiters(server, key) == 0)
    assert await other.acquire() is True
    await other.release()


async def test_with_raises_when_not_granted_in_time(
    client: Client, server: ServerProcess, key: str
) -> None:
    async with client.lock(key, server):
        with pytest.raises(errors.LockTimeoutError, match=rf"{key}.*0\.2 s") as caught:
            async with client.lock(key, server, acquire_timeout_s=0.2):
                pytest.fail("two holders")
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.key == key
        assert caught.value.server == f"127.0.0.1:{server.port}"


async def test_no_timeout_waits(client: Client, server: ServerProcess, key: str) -> None:
    raw = server.connect()
    token = raw.lock(key)
    lock = client.lock(key, server, acquire_timeout_s=None)
    acquiring = asyncio.ensure_future(lock.acquire())
    await until(lambda: waiters(server, key) == 1)
    assert not acquiring.done()
    raw.ask("r", key, token)
    assert await soon(acquiring) is True
    await lock.release()


async def test_a_very_long_timeout_waits(client: Client, server: ServerProcess, key: str) -> None:
    raw = server.connect()
    token = raw.lock(key)
    lock = client.lock(key, server, acquire_timeout_s=90 * 86400)
    acquiring = asyncio.ensure_future(lock.acquire())
    await until(lambda: waiters(server, key) == 1)
    raw.ask("r", key, token)
    assert await soon(acquiring) is True
    await lock.release()


async def test_first_come_first_served(client: Client, server: ServerProcess, key: str) -> None:
    order: list[int] = []
    first = client.lock(key, server)
    await first.acquire()

    async def work(number: int) -> None:
        async with client.lock(key, server, acquire_timeout_s=30):
            order.append(number)

    tasks = []
    for number in range(30):
        tasks.append(asyncio.create_task(work(number)))
        await until(lambda n=number: waiters(server, key) == n + 1)  # type: ignore[misc]
    await first.release()
    await soon(asyncio.gather(*tasks))
    assert order == list(range(30))


async def test_timeout_0_never_jumps_the_queue(
    client: Client, server: ServerProcess, key: str
) -> None:
    """While the lock goes from hand to hand, one that only tries must not get in between."""
    holders = [client.lock(key, server, acquire_timeout_s=30) for _ in range(10)]
    await holders[0].acquire()
    waiting = []
    for number, lock in enumerate(holders[1:]):
        waiting.append(asyncio.create_task(lock.acquire()))
        await until(lambda n=number: waiters(server, key) == n + 1)  # type: ignore[misc]
    trying = client.lock(key, server, acquire_timeout_s=0)
    for lock, next_one in zip(holders, waiting, strict=False):
        await lock.release()
        assert await trying.acquire() is False
        assert await soon(next_one) is True
    await holders[-1].release()
    assert await trying.acquire() is True
    await trying.release()


async def test_a_place_given_up_is_skipped(client: Client, server: ServerProcess, key: str) -> None:
    first = client.lock(key, server)
    await first.acquire()
    impatient = asyncio.create_task(client.lock(key, server, acquire_timeout_s=0.2).acquire())
    await until(lambda: waiters(server, key) == 1)
    patient = client.lock(key, server)
    waiting = asyncio.create_task(patient.acquire())
    await until(lambda: waiters(server, key) == 2)
    assert await soon(impatient) is False
    await first.release()
    assert await soon(waiting) is True
    await patient.release()


# Leases.


async def test_the_lease_is_renewed(server: ServerProcess, key: str) -> None:
    """Both clients at once, with short leases and long ones, and a share of each before a renewal."""

    async def hold(client: Client, lease: int, ratio: float) -> None:
        lost, times = Calls(), 3
        name = f"{key}-{client.name}-{lease}-{ratio}"
        options = {"lease_ttl_s": lease, "renew_ratio": ratio, "on_lost": lost}
        began = time.monotonic()
        async with client.lock(name, server, **options) as lock:
            assert lock.lease == lease
            token = lock.token
            await renewed(server, name, times)
            assert lock.held
            assert lock.token == token
            # A share of the lease passes before each renewal, less up to a tenth of that share.
            assert time.monotonic() - began > 0.9 * times * ratio * lease
        assert not lost.locks
        assert is_free(server, name)

    with client_named("sync") as blocking, client_named("asyncio") as not_blocking:
        await asyncio.gather(
            *(
                hold(client, *case)
                for client in (blocking, not_blocking)
                for case in ((600, 0.001), (60, 0.005), (60, 0.02), (8, 0.1))
            )
        )


async def test_renew(client: Client, server: ServerProcess, key: str) -> None:
    lock = client.lock(key, server, lease_ttl_s=10)
    assert await lock.renew() is False
    async with lock:
        assert await lock.renew(100) is True
        assert lock.lease == 100
        assert 95 < left_of_lease(server, key) <= 100
        assert await lock.renew() is True, "as granted last"
        assert lock.lease == 100
        for bad in (0, -1, 1.5, True, "5"):
            with pytest.raises(errors.InvalidArgumentError):
                await lock.renew(bad)
        assert lock.held
        assert lock.token
    assert await lock.renew() is False
    assert is_free(server, key)


async def test_release_and_renew_while_a_renewal_is_under_way(
    client: Client, server: ServerProcess, key: str
) -> None:
    """Its answer comes first, and is not taken for theirs."""
    for call in ("release", "renew"):
        proxy = Proxy(server.port)
        try:
            lock = client.lock(key, proxy, lease_ttl_s=20, renew_ratio=0.02)
            await lock.acquire()
            proxy.withhold_replies()
            seen = [left_of_lease(server, key)]

            def is_renewed(seen: list[float] = seen) -> bool:
                seen.append(left_of_lease(server, key))
                return seen[-1] > seen[-2]

            await until(is_renewed)
            calling = asyncio.ensure_future(getattr(lock, call)())
            await asyncio.sleep(0.05)
            assert not calling.done()
            proxy.pass_on()
            assert await soon(calling) is True
            assert await lock.release() is (call == "renew")
            assert is_free(server, key)
        finally:
            close_idle_connections()
            proxy.close()


async def test_a_lease_that_is_refused(client: Client, server: ServerProcess, key: str) -> None:
    with pytest.raises(errors.RefusedError, match="lease"):
        await client.lock(key, server, lease_ttl_s=10_000).acquire()
    assert is_free(server, key)


async def test_renewing_a_lock_that_is_gone(
    client: Client, server: ServerProcess, key: str
) -> None:
    lost = Calls()
    lock = client.lock(key, server, on_lost=lost)
    await lock.acquire()
    fence = lock.fence
    assert server.connect().ask("r", key, lock.token) == "ok"
    assert await lock.renew() is False
    assert not lock.held
    assert lock.fence == fence, "what a resource will refuse from now on"
    await lost.first()
    assert lock.state == "lost"
    assert await lock.release() is False
    assert lock.state == "free"
    assert await lock.acquire() is True
    assert lock.fence > fence
    assert len(lost.locks) == 1
    await lock.release()


async def test_releasing_a_lock_that_is_gone(
    client: Client, server: ServerProcess, key: str
) -> None:
    lock = client.lock(key, server)
    await lock.acquire()
    assert server.connect().ask("r", key, lock.token) == "ok"
    assert await lock.release() is False


# Connections.


async def test_connections_are_reused(client: Client, start: Callable[..., ServerProcess]) -> None:
    server = start()
    for number in range(50):
        async with client.lock(f"key-{number}", server):
            assert stats(server)["connections"] == 1
    assert stats(server)["connections"] == 1
    held = [client.lock(f"key-{number}", server) for number in range(40)]
    await asyncio.gather(*(lock.acquire() for lock in held))
    assert stats(server)["connections"] == 40
    await asyncio.gather(*(lock.release() for lock in held))
    await until(lambda: stats(server)["connections"] == 16)  # no more are kept idle


async def test_a_connection_shows_the_label_of_the_lock_that_has_it(
    client: Client, server: ServerProcess, key: str
) -> None:
    labels = {"me": "me", "": "", "two\nlines": "two lines", "я" * 200: "я" * 128}
    for label, shown in labels.items():
        async with client.lock(key, server, label=label) as lock:
            report = lock.inspect()
            report = await report if inspect.isawaitable(report) else report
            assert [holder["label"] for holder in report["holders"]] == [shown]


async def test_a_timeout_costs_no_connection(
    client: Client, start: Callable[..., ServerProcess]
) -> None:
    server = start()
    async with client.lock("key", server):
        for _ in range(10):
            assert await client.lock("key", server, acquire_timeout_s=0).acquire() is False
        assert stats(server)["connections"] == 2


async def test_idle_connections_of_a_restarted_server(
    client: Client, start: Callable[..., ServerProcess]
) -> None:
    """They are replaced without a word, however many there are."""
    server = start()
    locks = [client.lock(f"key-{number}", server) for number in range(5)]
    await asyncio.gather(*(lock.acquire() for lock in locks))
    await asyncio.gather(*(lock.release() for lock in locks))
    port = server.port
    server.end()
    server = start("--port", str(port))
    assert server.port == port
    async with client.lock("key", server) as lock:
        assert lock.held
    assert stats(server)["connections"] == 1


async def test_idle_connections_are_not_shared_between_credentials(
    client: Client, start: Callable[..., ServerProcess]
) -> None:
    server = start("--auth-token", SECRET)
    async with client.lock("key", server, auth_token=SECRET):
        pass
    with pytest.raises(errors.AuthRefusedError):
        await client.lock("key", server).acquire()
    with pytest.raises(errors.AuthRefusedError):
        await client.lock("key", server, auth_token="other").acquire()


@pytest.mark.parametrize("who", [{}, {"label": "me"}, {"label": "me", "owner": ("run", 0)}])
async def test_who_has_no_token_is_told_what_to_set(
    client: Client, start: Callable[..., ServerProcess], who: dict[str, Any]
) -> None:
    """Also if the server hangs up on what is said ahead of the request."""
    server = start("--auth-token", SECRET)
    for ask in ("acquire", "enqueue"):
        with pytest.raises(errors.AuthRefusedError, match="set auth_token"):
            await getattr(client.lock("key", server, **who), ask)()


@pytest.mark.parametrize("ending", ["run", "bare"])
async def test_event_loops_come_and_go_and_use_one_connection(
    server: ServerProcess, key: str, ending: str
) -> None:
    """It belongs to the process: the end of a loop neither takes it along nor leaves it unclosed."""
    text = """
import asyncio, gc, json, socket, sys, warnings
from dflockd.client import DistributedLock

port, ending = int(sys.argv[1]), sys.argv[2]

async def main():
    async with DistributedLock(sys.argv[3], servers=[("127.0.0.1", port)]):
        pass

def connections():
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"stats\\n_\\n_\\n")
        return json.loads(sock.makefile().readline()[3:])["connections"]

before = connections()
for _ in range(10):
    if ending == "run":
        asyncio.run(main())
    else:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        loop.close()
        gc.collect()
print(connections() - before)
"""
    warnings = ["-X", "dev", "-W", "error"]
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, *warnings, "-c", text, str(server.port), ending, key],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.stderr == ""
    assert int(result.stdout) == 1


# Semaphores.


async def test_semaphore(client: Client, server: ServerProcess, key: str) -> None:
    slots = [client.semaphore(key, 3, server, acquire_timeout_s=0) for _ in range(4)]
    assert [await slot.acquire() for slot in slots] == [True, True, True, False]
    assert len({slot.token for slot in slots[:3]}) == 3
    assert slots[0].limit == 3
    assert await slots[1].release() is True
    assert await slots[3].acquire() is True
    assert [await slot.release() for slot in slots] == [True, False, True, True]
    async with client.semaphore(key, 3, server), client.lock(key, server):
        pass  # two namespaces
    assert stats(server)["semaphores"] == []


async def test_semaphore_with_another_limit(
    client: Client, server: ServerProcess, key: str
) -> None:
    async with client.semaphore(key, 2, server):
        with pytest.raises(errors.LimitMismatchError, match=key):
            await client.semaphore(key, 3, server).acquire()
    async with client.semaphore(key, 3, server):
        pass


async def test_semaphore_is_renewed_and_enqueued(
    client: Client, server: ServerProcess, key: str
) -> None:
    first = client.semaphore(key, 1, server, lease_ttl_s=600, renew_ratio=0.001)
    assert await first.enqueue() == "acquired"
    second = client.semaphore(key, 1, server)
    assert await second.enqueue() == "queued"
    await renewed(server, key)
    assert first.held
    assert await first.renew() is True
    await first.release()
    assert await second.wait() is True
    await second.release()


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None, "2", 1 << 40])
def test_semaphore_with_a_bad_limit(client: Client, limit: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="limit"):
        client.module.DistributedSemaphore("key", limit)


# A place in the queue first, the lock later.


async def test_enqueue_and_wait(client: Client, server: ServerProcess, key: str) -> None:
    first, second, third = (client.lock(key, server) for _ in range(3))
    assert await first.enqueue() == "acquired"
    assert first.held
    assert await first.wait() is True, "nothing to wait for"
    assert await second.enqueue() == "queued"
    assert not second.held
    assert await third.enqueue() == "queued"
    for again in (second.acquire, second.enqueue, second.__aenter__):
        with pytest.raises(errors.AlreadyHeldError):
            await again()
    assert waiters(server, key) == 2, "the attempts must not cost the place"
    await first.release()
    assert await second.wait() is True
    assert second.held
    waiting = asyncio.create_task(third.wait())
    await second.release()
    assert await soon(waiting) is True
    await third.release()
    assert is_free(server, key)


@pytest.mark.parametrize("wait", [0, 0.3])
async def test_wait_in_vain(client: Client, server: ServerProcess, key: str, wait: float) -> None:
    async with client.lock(key, server):
        lock = client.lock(key, server)
        assert await lock.enqueue() == "queued"
        with Pace() as pace:
            assert await lock.wait(wait) is False
        assert wait <= pace.wall
        assert pace.seconds < wait + 0.6, "not a whole number of seconds"
        await until(lambda: waiters(server, key) == 0)
        with pytest.raises(errors.NotEnqueuedError, match=key):
            await lock.wait()
        assert await lock.enqueue() == "queued"
        await lock.release()
        await until(lambda: waiters(server, key) == 0)


async def test_wait_takes_its_default_from_the_lock(
    client: Client, server: ServerProcess, key: str
) -> None:
    async with client.lock(key, server):
        lock = client.lock(key, server, acquire_timeout_s=0.2)
        await lock.enqueue()
        assert await soon(lock.wait()) is False


async def test_wait_for_a_time_that_is_none(
    client: Client, server: ServerProcess, key: str
) -> None:
    async with client.lock(key, server):
        lock = client.lock(key, server)
        await lock.enqueue()
        for bad in (-1, float("nan"), "soon"):
            with pytest.raises(errors.InvalidArgumentError, match="timeout_s"):
                await lock.wait(bad)
        assert waiters(server, key) == 1, "the place is still there"
        await lock.release()


async def test_wait_without_enqueue(client: Client, server: ServerProcess, key: str) -> None:
    with pytest.raises(errors.NotEnqueuedError, match="enqueue"):
        await client.lock(key, server).wait()


async def test_a_grant_that_nobody_took_up(client: Client, server: ServerProcess, key: str) -> None:
    first = client.lock(key, server)
    await first.acquire()
    lock = client.lock(key, server, lease_ttl_s=1)
    assert await lock.enqueue() == "queued"
    await first.release()
    await until(lambda: is_free(server, key))
    with pytest.raises(errors.LeaseExpiredError, match=key):
        await lock.wait()
    assert not lock.held
    assert await lock.acquire() is True
    await lock.release()


async def test_a_place_ends_with_its_release(
    client: Client, server: ServerProcess, key: str
) -> None:
    first, lock = client.lock(key, server), client.lock(key, server)
    await first.acquire()
    await lock.enqueue()
    assert await lock.release() is False
    await until(lambda: waiters(server, key) == 0)
    await first.release()
    assert is_free(server, key)


# The server says no, or is none.


async def test_max_locks(client: Client, start: Callable[..., ServerProcess]) -> None:
    server = start("--max-locks", "1")
    async with client.lock("one", server):
        with pytest.raises(errors.MaxLocksError, match=r"'two' on 127\.0\.0\.1") as caught:
            await client.lock("two", server).acquire()
        assert (caught.value.key, caught.value.server) == ("two", f"127.0.0.1:{server.port}")
    async with client.lock("two", server):
        pass


async def test_max_waiters(client: Client, start: Callable[..., ServerProcess]) -> None:
    server = start("--max-waiters", "1")
    async with client.lock("key", server):
        waiting = client.lock("key", server)
        await waiting.enqueue()
        with pytest.raises(errors.MaxWaitersError, match="max-waiters"):
            await client.lock("key", server).acquire()
        await waiting.release()


async def test_auth(client: Client, start: Callable[..., ServerProcess]) -> None:
    server = start("--auth-token", SECRET)
    lock = client.lock("key", server, auth_token=SECRET)
    async with lock:
        assert lock.held
        assert SECRET not in repr(lock)
        assert SECRET not in repr(getattr(lock, "lock", lock)._session.route)
    for token in ("wrong-" + SECRET, None):
        with pytest.raises(errors.AuthRefusedError, match="auth") as caught:
            await client.lock("key", server, auth_token=token).acquire()
        assert isinstance(caught.value, PermissionError)
        assert SECRET not in str(caught.value)
        assert caught.value.server == f"127.0.0.1:{server.port}"


async def test_auth_where_none_is_wanted(client: Client, server: ServerProcess, key: str) -> None:
    with pytest.raises(errors.AuthRefusedError, match="wants no auth token") as caught:
        await client.lock(key, server, auth_token=SECRET).acquire()
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "token", ["", "two\nlines", SECRET * 4000, SECRET + "\udc80", SECRET.encode()]
)
def test_an_auth_token_that_cannot_be_sent(client: Client, token: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="auth_token") as caught:
        client.module.DistributedLock("key", auth_token=token)
    assert SECRET not in str(caught.value)


async def test_no_server(client: Client) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, but not listening: refused
        port = sock.getsockname()[1]
        lock = client.lock("key", servers=[("127.0.0.1", port)])
        with pytest.raises(errors.UnreachableError, match=f"127.0.0.1:{port}.*refused") as caught:
            await soon(lock.acquire())
    assert isinstance(caught.value, ConnectionError)
    assert "\n" not in str(caught.value)
    assert caught.value.server == f"127.0.0.1:{port}"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))
    assert copy.server == caught.value.server
    assert not lock.held


@pytest.mark.parametrize("host", ["host.invalid", "x" * 64, "a..b"])
async def test_no_such_host(client: Client, host: str) -> None:
    lock = client.lock("key", servers=[(host, 6388)])
    with pytest.raises(errors.UnreachableError, match=f"{host}:6388"):
        await soon(lock.acquire())


@pytest.fixture
def impostor() -> Iterator[Callable[[bytes], int]]:
    """Listen and answer the first thing that is said with the same bytes, whatever it is."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def serve(answer: bytes) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                sock.recv(65536)
                if answer:
                    sock.sendall(answer)
                if answer != b"hang up":
                    ended.wait(PATIENCE)

    def begin(answer: bytes) -> int:
        threads.append(threading.Thread(target=serve, args=(answer,), daemon=True))
        threads[-1].start()
        return int(listener.getsockname()[1])

    yield begin
    ended.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in threads:
        thread.join(PATIENCE)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"ok\n",
        b"ok token\n",
        b"ok token 0\n",
        b"ok token -5\n",
        b"ok token 33 more\n",
        b"\xff\xfe\n",
        b"-ERR unknown command\r\n",
        b"queued\n",
        b"timeout\ntimeout\n",
    ],
)
async def test_an_answer_that_is_none(
    client: Client, impostor: Callable[[bytes], int], answer: bytes
) -> None:
    port = impostor(answer)
    lock = client.lock("key", servers=[("127.0.0.1", port)])
    with pytest.raises(errors.BadReplyError, match=f"127.0.0.1:{port}") as caught:
        await soon(lock.acquire())
    assert "\n" not in str(caught.value)
    assert not lock.held


async def test_a_server_that_hangs_up(client: Client, impostor: Callable[[bytes], int]) -> None:
    port = impostor(b"hang up")
    with pytest.raises((errors.UnreachableError, errors.BadReplyError), match=f":{port}"):
        await soon(client.lock("key", servers=[("127.0.0.1", port)]).acquire())


async def test_a_server_that_never_answers(
    client: Client, impostor: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "GRACE", 0.3)
    port = impostor(b"")
    lock = client.lock("key", servers=[("127.0.0.1", port)], acquire_timeout_s=0)
    with (
        Pace() as pace,
        pytest.raises(errors.UnreachableError, match=f"127.0.0.1:{port}.*no answer in time"),
    ):
        await soon(lock.acquire())
    assert pace.wall >= 0.3
    assert pace.seconds < 1, "nor the usual time for an answer"
    assert not lock.held


async def test_a_draining_server(client: Client, start: Callable[..., ServerProcess]) -> None:
    server = start()
    holder, waiter = client.lock("key", server), client.lock("key", server)
    await holder.acquire()
    waiting = asyncio.create_task(waiter.acquire())
    await until(lambda: waiters(server, "key") == 1)
    server.process.terminate()
    with pytest.raises(errors.DrainingError, match="shutting down"):
        await soon(waiting)
    assert holder.held
    assert await holder.renew() is True
    assert await holder.release() is True
    assert server.wait() == 0


# Other ways to a server.


async def test_unix_socket(
    client: Client, start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    path = tmp_path / "lock.sock"
    server = start("--unix-socket", str(path))
    server.wait_for_log("listening on unix:")
    async with client.lock("key", servers=[f"unix:{path}"]) as lock:
        assert lock.server == f"unix:{path}"
        assert not is_free(server, "key")
    assert is_free(server, "key")
    with pytest.raises(errors.UnreachableError, match=f"unix:{path}-2"):
        await client.lock("key", servers=[f"unix:{path}-2"]).acquire()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not on PATH")
async def test_tls(client: Client, start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    certificate, private = make_certificate(tmp_path)
    other, _ = make_certificate(tmp_path, "other")
    server = start("--tls-cert", str(certificate), "--tls-key", str(private))
    context = ssl.create_default_context(cafile=str(certificate))
    lost = Calls()
    options = {"lease_ttl_s": 600, "renew_ratio": 0.001}
    lock = client.lock("key", server, ssl_context=context, on_lost=lost, **options)
    assert await lock.acquire() is True
    second = client.lock("key", server, ssl_context=context)
    assert await second.enqueue() == "queued"
    await renewed(server, "key", context=context)
    assert lock.held, "renewed over TLS"
    assert await lock.release() is True
    assert await second.wait() is True
    assert await second.release() is True
    assert not lost.locks

    wrong = ssl.create_default_context(cafile=str(other))
    with pytest.raises(errors.UnreachableError, match="certificate verify failed") as caught:
        await soon(client.lock("key", server, ssl_context=wrong).acquire())
    assert f"127.0.0.1:{server.port}" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(errors.RemoteError):  # no TLS at all
        await soon(client.lock("key", server).acquire())


async def test_tls_to_a_server_without(client: Client, server: ServerProcess, key: str) -> None:
    context = ssl.create_default_context()
    with pytest.raises(errors.UnreachableError, match=f"127.0.0.1:{server.port}"):
        await soon(client.lock(key, server, ssl_context=context).acquire())


# Several servers.


async def test_keys_are_spread_over_servers(
    client: Client, start: Callable[..., ServerProcess]
) -> None:
    pair = [start(), start()]
    servers = [("127.0.0.1", server.port) for server in pair]
    for number in range(8):
        key = f"key-{number}"
        home = client.module.stable_hash_shard(key, 2)
        async with client.lock(key, servers=servers) as lock:
            assert lock.server == f"127.0.0.1:{servers[home][1]}"
            assert not is_free(pair[home], key)
            assert is_free(pair[1 - home], key)


async def test_a_strategy_of_ones_own(client: Client, start: Callable[..., ServerProcess]) -> None:
    pair = [start(), start()]
    servers = [("127.0.0.1", server.port) for server in pair]
    asked = []

    def last(key: str, count: int) -> int:
        asked.append((key, count))
        return count - 1

    async with client.lock("key", servers=servers, sharding_strategy=last):
        assert [is_free(server, "key") for server in pair] == [True, False]
    assert asked == [("key", 2)]


@pytest.mark.parametrize("answer", [2, -1, 0.0, "0", None, True, [0]])
def test_a_strategy_that_returns_no_index(client: Client, answer: Any) -> None:
    def odd(_key: str, _count: int) -> Any:
        return answer

    with pytest.raises(errors.InvalidArgumentError, match=r"odd returned .* from 0 to 1") as caught:
        client.module.DistributedLock("key", servers=["a", "b"], sharding_strategy=odd)
    assert caught.value.key == "key"


# What cannot be right.


@pytest.mark.parametrize("bad", ["", "two words", "a\nb", "tab\t", "x" * 257, "\udc80", None, b"k"])
def test_bad_keys(client: Client, bad: Any) -> None:
    with pytest.raises(errors.InvalidKeyError, match="key") as caught:
        client.module.DistributedLock(bad)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("acquire_timeout_s", [-1, float("nan"), float("inf"), "10", True, 1e12]),
        ("lease_ttl_s", [0, -1, 0.5, 33.0, "33", True, 10**12]),
        ("renew_ratio", [0, 1, -0.5, 1.5, float("nan")]),
        ("servers", [[], None, "localhost", [("a", 1), ("a", 1)], [("a", 0)], [("a", "1")], [3]]),
        ("servers", [[""], ["a b"], [" a"], [("a\n", 1)], ["unix:"], ["unix:/a b"]]),
    ],
)
def test_bad_arguments(client: Client, option: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(errors.InvalidArgumentError, match=option.rstrip("s")):
            client.module.DistributedLock("key", **{option: value})


def test_a_key_may_be_any_text(client: Client) -> None:
    for key in ("x" * 256, "é" * 128, "ключ", "a/b:c", "🔒"):
        assert client.module.DistributedLock(key).key == key


async def test_a_key_of_any_text_is_locked(client: Client, server: ServerProcess) -> None:
    for key in ("x" * 256, "ключ-🔒"):
        async with client.lock(key, server):
            assert not is_free(server, key)
