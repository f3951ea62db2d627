"""The snippets of the published manual run as printed; only where the servers are is changed.

They are what people have in their programs, so they are quoted here to the letter.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from dflockd import client, sharding, sync_client
from tests.dflockd.client_support import but_slow_steps, run_strictly, stats
from tests.dflockd.raw_server import PATIENCE, ServerProcess

ASYNC_CLIENT = """\
import asyncio
from dflockd.client import DistributedLock

async def main():
    async with DistributedLock("my-key", acquire_timeout_s=10) as lock:
        print(lock.token, lock.lease)
        # critical section — lease auto-renews in background

asyncio.run(main())
"""

SYNC_CLIENT = """\
from dflockd.sync_client import DistributedLock

with DistributedLock("my-key", acquire_timeout_s=10) as lock:
    print(lock.token, lock.lease)
    # critical section — lease auto-renews in background thread
"""

MANUAL = """\
from dflockd.sync_client import DistributedLock

lock = DistributedLock("my-key")
if lock.acquire():
    try:
        pass  # critical section
    finally:
        lock.release()
"""

MULTI_SERVER = """\
from dflockd.sync_client import DistributedLock

servers = [("server1", 6388), ("server2", 6388), ("server3", 6388)]

with DistributedLock("my-key", servers=servers) as lock:
    print(lock.token, lock.lease)
"""

CUSTOM_STRATEGY = '''\
from dflockd.sync_client import DistributedLock

def my_strategy(key: str, num_servers: int) -> int:
    """Route all keys to the first server."""
    return 0

with DistributedLock("my-key", servers=servers, sharding_strategy=my_strategy) as lock:
    pass
'''

STABLE_HASH = """\
def stable_hash_shard(key: str, num_servers: int) -> int:
    return zlib.crc32(key.encode("utf-8")) % num_servers
"""

SHARDED = """\
from dflockd.sync_client import DistributedLock

servers = [
    ("lock-server-1", 6388),
    ("lock-server-2", 6388),
    ("lock-server-3", 6388),
]

with DistributedLock("my-key", servers=servers) as lock:
    # "my-key" always routes to the same server
    pass
"""

REGIONS = '''\
from dflockd.sync_client import DistributedLock

def region_shard(key: str, num_servers: int) -> int:
    """Route keys prefixed with 'eu-' to server 0, everything else hashed."""
    if key.startswith("eu-"):
        return 0
    import zlib
    return zlib.crc32(key.encode()) % num_servers

servers = [("eu-server", 6388), ("us-server-1", 6388), ("us-server-2", 6388)]

with DistributedLock("eu-job-1", servers=servers, sharding_strategy=region_shard) as lock:
    pass  # routes to eu-server
'''

TYPE_SIGNATURE = """\
from collections.abc import Callable

ShardingStrategy = Callable[[str, int], int]
"""

# The later manual prints the two sharding examples with another package name. Read as ours:
SHARDED_LATER = SHARDED.replace("from dflockd.", "from dflockd_client.")
REGIONS_LATER = REGIONS.replace("from dflockd.", "from dflockd_client.")

PARAMETERS = """\
| Parameter           | Default                 | Description                                                             |
| ------------------- | ----------------------- | ----------------------------------------------------------------------- |
| `key`               | _(required)_            | Lock name                                                               |
| `acquire_timeout_s` | `10`                    | Seconds to wait for lock acquisition                                    |
| `lease_ttl_s`       | `None` (server default) | Lease duration in seconds                                               |
| `servers`           | `[("127.0.0.1", 6388)]` | List of `(host, port)` tuples                                           |
| `sharding_strategy` | `stable_hash_shard`     | `Callable[[str, int], int]` — maps `(key, num_servers)` to server index |
| `renew_ratio`       | `0.5`                   | Renew at `lease * ratio` seconds                                        |
"""  # noqa: E501

HOSTS = {
    "server1": 0,
    "server2": 1,
    "server3": 2,
    "lock-server-1": 0,
    "lock-server-2": 1,
    "lock-server-3": 2,
    "eu-server": 0,
    "us-server-1": 1,
    "us-server-2": 2,
}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerProcess]]:
    """Three independent servers."""
    servers = [ServerProcess() for _ in range(3)]
    yield servers
    for server in servers:
        server.end()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(servers: list[ServerProcess]) -> Iterator[None]:
    yield
    for server in servers:
        assert stats(server)["locks"] == []


def run(script: str, servers: list[ServerProcess], more: str = "") -> list[str]:
    """Run a snippet in an interpreter of its own, with `more` behind it; return what it printed."""

    def here(match: re.Match[str]) -> str:
        return f'("127.0.0.1", {servers[HOSTS[match[1]]].port})'

    script = re.sub(r'\("([a-z0-9-]+)", 6388\)', here, script)
    if "servers" not in script:
        # It means the default server. That port may be in use on this machine.
        address = f'servers=[("127.0.0.1", {servers[0].port})]'
        script = script.replace('DistributedLock("my-key"', f'DistributedLock("my-key", {address}')
    script = script.replace("dflockd_client.", "dflockd.")
    assert not re.search(r"\b6388\b", script)
    result = run_strictly(script + more)
    assert but_slow_steps(result.stderr) == ""
    assert result.returncode == 0
    return result.stdout.splitlines()


WHERE = "\nprint(lock.server)\n"


@pytest.mark.parametrize("script", [ASYNC_CLIENT, SYNC_CLIENT, MULTI_SERVER])
def test_it_prints_token_and_lease(servers: list[ServerProcess], script: str) -> None:
    (line,) = run(script, servers)
    assert re.fullmatch("[0-9a-f]{32} 33", line)


def test_manual_acquire_and_release(servers: list[ServerProcess]) -> None:
    script = MANUAL.replace("pass  #", "print(lock.held)  #")
    assert run(MANUAL, servers) == []
    assert run(script, servers, "\nprint(lock.held)\n") == ["True", "False"]


@pytest.mark.parametrize("script", [MULTI_SERVER, SHARDED, SHARDED_LATER])
def test_the_key_is_where_its_hash_says(servers: list[ServerProcess], script: str) -> None:
    home = servers[zlib.crc32(b"my-key") % 3]
    assert run(script, servers, WHERE)[-1] == f"127.0.0.1:{home.port}"


def test_custom_strategy(servers: list[ServerProcess]) -> None:
    # Printed behind the one with several servers, whose list it uses.
    assert run(MULTI_SERVER + CUSTOM_STRATEGY, servers, WHERE)[-1] == (
        f"127.0.0.1:{servers[0].port}"
    )


@pytest.mark.parametrize("script", [REGIONS, REGIONS_LATER])
def test_regions(servers: list[ServerProcess], script: str) -> None:
    assert run(script, servers, WHERE) == [f"127.0.0.1:{servers[0].port}"]
    hashed = script.replace("eu-job-1", "us-job-1")
    home = servers[zlib.crc32(b"us-job-1") % 3]
    assert run(hashed, servers, WHERE) == [f"127.0.0.1:{home.port}"]


@pytest.mark.parametrize("module", [client, sync_client])
def test_the_documented_parameters(module: ModuleType) -> None:
    parameters = inspect.signature(module.DistributedLock).parameters
    rows = [line.split("|") for line in PARAMETERS.splitlines()[2:]]
    documented = {row[1].strip(" `"): row[2].strip() for row in rows}
    assert list(parameters)[: len(documented)] == list(documented)
    for name, text in documented.items():
        default = parameters[name].default
        assert parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if text == "_(required)_":
            assert default is inspect.Parameter.empty
            continue
        code = re.match("`(.+?)`", text)
        assert code is not None
        expected = eval(code[1], {"stable_hash_shard": sharding.stable_hash_shard})
        assert (list(default) if name == "servers" else default) == expected


@pytest.mark.parametrize(
    ("key", "homes"),
    [
        # (of 1, of 2, of 3, of 5, of 16 servers)
        ("my-key", (0, 1, 2, 2, 1)),
        ("eu-job-1", (0, 0, 2, 2, 0)),
        ("", (0, 0, 0, 0, 0)),
        ("ключ", (0, 0, 0, 3, 10)),
    ],
)
def test_stable_hash_shard(key: str, homes: tuple[int, ...]) -> None:
    printed: dict[str, Any] = {"zlib": zlib}
    exec(STABLE_HASH, printed)
    for count, home in zip((1, 2, 3, 5, 16), homes, strict=True):
        assert sharding.stable_hash_shard(key, count) == home
        assert printed["stable_hash_shard"](key, count) == home
    assert sync_client.stable_hash_shard is client.stable_hash_shard is sharding.stable_hash_shard


def test_stable_hash_shard_in_every_process() -> None:
    script = (
        "from dflockd.sharding import stable_hash_shard as shard\n"
        "print([shard(f'key-{n}', 7) for n in range(20)], hash('key'))"
    )
    printed = []
    for seed in ("0", "1", "4711"):
        result = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        printed.append(result.stdout.split("] "))
    assert len({shards for shards, _ in printed}) == 1
    assert len({hashed for _, hashed in printed}) == 3, "the seeds have had no effect"
    assert printed[0][0].strip("[]").split(", ") == [
        str(zlib.crc32(f"key-{n}".encode()) % 7) for n in range(20)
    ]


def test_the_type_of_strategies() -> None:
    printed: dict[str, Any] = {}
    exec(TYPE_SIGNATURE, printed)
    assert sharding.ShardingStrategy == printed["ShardingStrategy"]
    assert client.ShardingStrategy == sync_client.ShardingStrategy == sharding.ShardingStrategy
