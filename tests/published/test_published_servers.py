"""Our clients, against the published server in Python. It is installed as the published clients are."""

import asyncio
import contextlib
import os
import re
import subprocess
import threading
import time

import pytest

from tests.dflockd.client_support import Calls, client_named, soon
from tests.published.test_published_clients import BOUND, python_with

pytestmark = pytest.mark.timeout(500)

PAIRS = [
    ("dflockd==0.4.1", "sync"),
    ("dflockd==0.5.0", "asyncio"),
    pytest.param(("dflockd==0.4.1", "asyncio"), marks=pytest.mark.soak),
    pytest.param(("dflockd==0.5.0", "sync"), marks=pytest.mark.soak),
]
"""A package with its server, and which of our clients meets it."""


class PublishedServer:
    """A published server in a process of its own."""

    def __init__(self, program, *flags):
        # With a path of ours it would import our package, which has the same name.
        ours = ("DFLOCKD_", "PYTHONPATH")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self.process = subprocess.Popen(
            [program, "--host", "127.0.0.1", "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=clean,
        )
        self.log = []
        self._ended = False
        self._logged = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            line = self.wait_for_log("listening on")
            self.port = int(re.search(r"'127\.0\.0\.1', (\d+)", line)[1])
        except BaseException:
            self.end()
            raise

    def _read(self):
        for line in self.process.stderr:
            with self._logged:
                self.log.append(line)
                self._logged.notify_all()
        with self._logged:
            self._ended = True
            self._logged.notify_all()

    def times_logged(self, text):
        return sum(text in line for line in self.log)

    def wait_for_log(self, text, times=1):
        """Wait until a text has been logged so often, and return its last line."""
        with self._logged:
            self._logged.wait_for(lambda: self._ended or self.times_logged(text) >= times, BOUND)
        found = self.times_logged(text) >= times
        assert found, f"{text!r} is not in the log {times} times: {self.log}"
        return [line for line in self.log if text in line][-1]

    def end(self):
        self.process.kill()
        self.process.wait(BOUND)
        self._reader.join(BOUND)
        self.process.stderr.close()


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(request):
    return request.param


@pytest.fixture(scope="module")
def program(pair):
    return str(python_with(pair[0]).with_name("dflockd"))


@pytest.fixture
def published(program):
    """Start published servers with given flags; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*flags):
            server = PublishedServer(program, *flags)
            stack.callback(server.end)
            return server

        yield start


@pytest.fixture
def client(pair):
    with client_named(pair[1]) as client:
        yield client


async def test_a_lock_is_kept(client, published):
    """It answers renewals with the whole seconds that are left, which is one less than the lease."""
    server, lost = published(), Calls()
    lock = client.lock("key", server, lease_ttl_s=3, renew_ratio=0.3, on_lost=lost)
    assert await lock.acquire() is True
    end = time.monotonic() + 5
    while time.monotonic() < end:
        assert await client.lock("key", server, acquire_timeout_s=0).acquire() is False
        assert not lost.locks
        assert lock.held
        await asyncio.sleep(0.2)
    assert await lock.release() is True
    async with client.lock("key", server, acquire_timeout_s=0):
        pass


async def test_it_gives_up_idle_connections(client, published):
    server = published("--read-timeout", "1")
    for number in range(1, 4):
        lock = client.lock("key", server, acquire_timeout_s=1)
        assert await soon(lock.acquire()) is True
        assert await soon(lock.release()) is True
        await asyncio.to_thread(server.wait_for_log, "client closed", number)


async def test_an_event_loop_that_stood_still_meanwhile(published):
    server = published("--read-timeout", "1")
    with client_named("asyncio") as client:
        for number in range(1, 4):
            lock = client.lock("key", server, acquire_timeout_s=1)
            assert await soon(lock.acquire()) is True
            assert await soon(lock.release()) is True
            server.wait_for_log("client closed", number)  # in which the loop does nothing else


async def test_who_introduces_himself(client, published):
    """It answers what it does not know, and hangs up. It is told nothing from then on."""
    server = published()
    introduced = {"label": "me", "owner": ("run", 1)}
    holder = client.lock("key", server, lease_ttl_s=2, renew_ratio=0.3, **introduced)
    assert await soon(holder.acquire()) is True
    for _ in range(3):
        # What it does not know cannot be in the way.
        again = client.lock("key", server, acquire_timeout_s=0, **introduced)
        assert await soon(again.acquire()) is False
    assert server.times_logged("client closed") <= 1, server.log
    waiter = client.lock("key", server, acquire_timeout_s=10, **introduced)
    waits = asyncio.ensure_future(soon(waiter.acquire()))
    await asyncio.sleep(2.5)
    assert holder.held
    assert await soon(holder.release()) is True
    assert await waits is True
    assert await soon(waiter.release()) is True


async def test_who_wants_his_position_kept(client, published, program):
    """It is not, and that is all."""
    if "0.4" in program:
        pytest.skip("it knows no positions")
    server = published()
    holder, waiter = (client.lock("key", server, label="me") for _ in range(2))
    assert await soon(holder.acquire()) is True
    assert await soon(waiter.enqueue()) == "queued"
    assert await soon(waiter.wait(1, reservation=client.module.Reservation(1, 1))) is False
    assert waiter.ticket is None
    assert await soon(waiter.enqueue("7ticket7")) == "queued"
    assert await soon(holder.release()) is True
    assert await soon(waiter.wait(5)) is True
    assert await soon(waiter.release()) is True
