"""Connections are reused, and shared by those that may share them."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from dflockd import errors
from tests.dflockd.client_support import Client, but_slow_steps, run_strictly, stats, until
from tests.dflockd.raw_server import ServerProcess, StartServer

pytestmark = pytest.mark.usefixtures("no_idle_connections")

SECRET = "open-sesame-0123456789"


async def test_connections_are_reused(client: Client, start: StartServer) -> None:
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


async def test_a_timeout_costs_no_connection(client: Client, start: StartServer) -> None:
    server = start()
    async with client.lock("key", server):
        for _ in range(10):
            assert await client.lock("key", server, acquire_timeout_s=0).acquire() is False
        assert stats(server)["connections"] == 2


async def test_idle_connections_of_a_restarted_server(client: Client, start: StartServer) -> None:
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
    client: Client, start: StartServer
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
    client: Client, start: StartServer, who: dict[str, Any]
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
    result = await asyncio.to_thread(run_strictly, text, server.port, ending, key)
    assert but_slow_steps(result.stderr) == ""
    assert int(result.stdout) == 1
