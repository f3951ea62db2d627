"""Servers behind sockets with a path, behind TLS, and several of them; what cannot be right."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflockd import errors
from tests.dflockd.client_support import Calls, Client, is_free, make_certificate, renewed, soon
from tests.dflockd.raw_server import ServerProcess

pytestmark = pytest.mark.usefixtures("no_idle_connections")


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
        ("servers", [["::1"], ["[::g]"], [("[::1]", 1)], [("a:1", 1)], ["[0::1]:1", "[::1]:1"]]),
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
