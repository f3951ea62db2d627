"""`dflockd cluster` against a real etcd, in which the records of the servers are written by hand."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest

from dflockd.cli import main
from dflockd.cluster import commands
from dflockd.cluster.parameters import ClusterParameters
from dflockd.shards import (
    Cluster,
    Put,
    RevisionIs,
    ShardMapping,
    Store,
    follow,
    format_shard_value,
    parse_shard_value,
)
from dflockd.shards.etcd import EtcdStore
from dflockd.shards.keys import SERVERS_MARK
from tests import forkserver
from tests.dflockd.cluster import few_shards
from tests.dflockd.cluster.few_shards import SHARDS
from tests.dflockd.shards.etcd_process import Etcd

_numbers = itertools.count()

NODES = ["10.0.0.1:6388", "10.0.0.2:6388", "10.0.0.3:6388"]

COMMAND = [sys.executable, "-m", few_shards.__name__, "cluster"]


@pytest.fixture
async def store(etcd: Etcd) -> AsyncIterator[Store]:
    store = EtcdStore([etcd.endpoint], timeout=10)
    yield store
    await store.close()


class Servers:
    """Servers that have registered, and take over whatever is given to them."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.store = store
        self.prefix = prefix
        self.clusters = {
            node: Cluster(store, node, prefix=prefix, ttl=60, num_shards=SHARDS, mark=SERVERS_MARK)
            for node in NODES
        }

    async def start(self, *nodes: str) -> None:
        for node in nodes:
            assert await self.clusters[node].registration.register()
        await self.store.txn([], [Put(f"{self.prefix}/meta", ClusterParameters(SHARDS).dump())])

    async def serve(self) -> None:
        """Do what real servers do about targets, without any locks, until cancelled."""
        async for news in follow(self.store, f"{self.prefix}/shard/"):
            changed = news if isinstance(news, list) else []
            for event in changed:
                assert event.record is not None
                record = parse_shard_value(event.record.value)
                if record.current != record.target:
                    taken = format_shard_value(record._replace(current=record.target)).encode()
                    await self.store.txn(
                        [RevisionIs(event.key, event.revision)], [Put(event.key, taken)]
                    )

    async def mapping(self) -> ShardMapping:
        return await self.clusters[NODES[0]].mapper.load_shard_mapping()


@pytest.fixture
async def servers(store: Store) -> AsyncIterator[Servers]:
    """Two that serve all shards, and a third that has just come."""
    servers = Servers(store, f"/commands-{next(_numbers)}")
    await servers.start(*NODES)
    mapper = servers.clusters[NODES[0]].mapper
    mapping = await mapper.create_shard_mapping(NODES[:2])
    served = {s: r._replace(current=r.target) for s, r in enumerate(mapping.records)}
    await mapper.store_shard_mapping(mapping.with_records(served))
    serving = asyncio.ensure_future(servers.serve())
    yield servers
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def environment(etcd: Etcd, servers: Servers) -> dict[str, str]:
    return {
        **os.environ,
        "DFLOCKD_CLUSTER": f"etcd://{etcd.endpoint}",
        "DFLOCKD_CLUSTER_PREFIX": servers.prefix,
    }


async def command(
    etcd: Etcd, servers: Servers, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        forkserver.run, [*COMMAND, *arguments], env=environment(etcd, servers), timeout=60
    )


async def output(etcd: Etcd, servers: Servers, *arguments: str) -> str:
    done = await command(etcd, servers, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


async def test_status(etcd: Etcd, servers: Servers, store: Store) -> None:
    await store.txn([], [Put(f"{servers.prefix}/leaving/{NODES[1]}", b"x")])
    text = await output(etcd, servers, "status")
    *rows, last = text.splitlines()
    assert last == (
        "256 shards: 256 served, 0 recovering, 0 moving, 0 of servers that are gone, "
        "0 without a server; 0 pinned"
    )
    assert [row.split() for row in rows] == [
        ["server", "serves", "is", "to", "serve"],
        [NODES[0], "128", "128", "leader"],
        [NODES[1], "128", "128", "leaving"],
        [NODES[2], "0", "0"],
    ]


async def test_status_names_shards_that_nobody_will_serve(etcd: Etcd, servers: Servers) -> None:
    cluster = servers.clusters[NODES[1]]
    await cluster.mapper.pin_shard(1)  # the second node's
    await cluster.registration.end()
    text = await output(etcd, servers, "status")
    assert f"{NODES[1]}       0          128  gone, had 128" in text
    assert "256 shards: 128 served, 0 recovering, 0 moving, 128 of servers that are gone" in text
    assert "1 shards are pinned to servers that are gone, the first of them 1: start" in text


async def test_a_reader_that_has_seen_enough_is_no_error(etcd: Etcd, servers: Servers) -> None:
    """``dflockd cluster status | grep -q ...`` ends before all is written."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = await asyncio.to_thread(
            forkserver.run,
            [*COMMAND, "status"],
            env=environment(etcd, servers),
            stdout=writing,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


async def test_status_tells_what_recovers_and_what_is_on_its_way(
    etcd: Etcd, servers: Servers, store: Store
) -> None:
    until = int(time.time()) + 3600
    values = [
        f"{NODES[0]},{NODES[0]},f=e:2,f=recovers:{until}",
        f"{NODES[1]},{NODES[1]},f=e:2,f=recovers:{until - 7200}",
        "",
    ]
    await store.txn(
        [], [Put(f"{servers.prefix}/shard/{s}", value.encode()) for s, value in enumerate(values)]
    )
    lease = (await store.grant_lease(60)).id
    puts = [
        Put(f"{servers.prefix}/nodes/0", b"by hand"),
        Put(f"{servers.prefix}/nodes/1", b"x", lease),
    ]
    await store.txn([], [*puts, Put(f"{servers.prefix}.closed", b"10.0.0.9:1")])
    text = await output(etcd, servers, "status")
    assert "256 shards: 254 served, 1 recovering, 0 moving, " in text
    assert "0 of servers that are gone, 1 without a server; 0 pinned" in text
    assert f"{NODES[0]}     127          127  leader, 1 recover" in text
    assert "those that recover grant nothing for up to 3" in text
    for name in ("0", "1"):
        assert f"the entry of {name} was not written by a server, and is ignored: delete it" in text
    assert "etcd was wiped, or restored from a backup, says 10.0.0.9:1: servers that" in text
    found = json.loads(await output(etcd, servers, "status", "--json"))
    assert [shard["state"] for shard in found["shards"][:4]] == [
        "recovering",
        "served",
        "unassigned",
        "served",
    ]
    assert found["counts"] == {
        "served": 254,
        "recovering": 1,
        "moving": 0,
        "gone": 0,
        "unassigned": 1,
    }


async def test_status_for_scripts(etcd: Etcd, servers: Servers) -> None:
    found = json.loads(await output(etcd, servers, "status", "--json"))
    assert found["servers"] == NODES
    assert found["leader"] == NODES[0]
    assert len(found["shards"]) == SHARDS
    assert found["shards"][3] == {
        "target": NODES[1],
        "current": NODES[1],
        "epoch": 0,
        "pinned": False,
        "state": "served",
    }
    assert found["gone"] == []


async def test_rebalance_waits_until_the_servers_have_moved_them(
    etcd: Etcd, servers: Servers
) -> None:
    text = await output(etcd, servers, "rebalance")
    assert text.startswith("85 shards moved in ")
    assert dict((await servers.mapping()).counts()) == dict(zip(NODES, (85, 86, 85), strict=True))
    assert (await output(etcd, servers, "rebalance")).startswith("0 shards moved in ")


async def test_what_recovers_is_not_moved(etcd: Etcd, servers: Servers, store: Store) -> None:
    value = f"{NODES[0]},{NODES[0]},f=e:2,f=recovers:{int(time.time()) + 3600}"
    await store.txn([], [Put(f"{servers.prefix}/shard/4", value.encode())])
    before = await servers.mapping()
    for arguments in (["rebalance"], ["move", "0-9", "--to", NODES[2]]):
        done = await command(etcd, servers, *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert "1 of these shards recover for up to 3" in done.stderr
        assert "the first of them 4: moved before that, their next server would" in done.stderr
    assert await servers.mapping() == before
    assert (await output(etcd, servers, "move", "0-3", "--to", NODES[2])).startswith("4 shards")


async def test_pinned_shards_stay_unless_they_are_moved_by_name(
    etcd: Etcd, servers: Servers
) -> None:
    assert await output(etcd, servers, "pin", "0-9", "key:object-123") == "11 shards pinned\n"
    mapping = await servers.mapping()
    assert [s for s, r in enumerate(mapping.records) if r.pinned] == [*range(10), 203]
    assert await output(etcd, servers, "unpin", "9") == "1 shards unpinned\n"

    text = await output(etcd, servers, "move", "key:object-123", "--to", NODES[2])
    assert text.startswith("1 shards moved in ")
    assert format_shard_value((await servers.mapping())[203]) == f"{NODES[2]},{NODES[2]},f=pinned"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["pin", "99-0"], "shard '99-0' is an empty range: write 0-99"),
        (["pin", "0-99999999999"], "shard '0-99999999999' does not exist: they are 0 to 8191"),
        (["pin", "9" * 5000], "does not exist: they are 0 to 8191"),
        (["unpin", "8192-3"], "shard '8192-3' does not exist"),
        (["pin", "key:"], "shard 'key:': the key is empty, so that no lock has it"),
        (["pin", "key:a b"], "shard 'key:a b': the key contains white space or NUL"),
        (["pin", "key:\udcff"], "the key is not UTF-8, so that no lock has it"),
        (["pin", "key:" + "k" * 300], "the key has 300 bytes, 256 are allowed"),
        (["pin", "\u0663"], "is malformed: write 7, 0-99 or key:NAME"),
        (["pin", "\u00b2"], "is malformed: write 7, 0-99 or key:NAME"),
        (["pin", "0", "1", "x"], "shard 'x' is malformed"),
        (["pin"], "the following arguments are required: SHARD"),
        (["rebalance", "--threshold", "nan"], "'nan' is not a share of the mean, such as 0.2"),
        (["rebalance", "--threshold=-1"], "'-1' is not a share of the mean"),
        (["rebalance", "--threshold", "x"], "'x' is not a share of the mean"),
        (["status", "x"], "unrecognized arguments: x"),
        (["status", "--clust", "x"], "unrecognized arguments: --clust x"),
        (["move", "1"], "the following arguments are required: --to"),
        (["pin", "8192"], "shard '8192' does not exist: they are 0 to 8191"),
        (["pin", "x"], "shard 'x' is malformed: write 7, 0-99 or key:NAME"),
        (["pin", "9-"], "shard '9-' is malformed"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_what_is_not_understood_is_refused_before_anybody_is_asked(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    error: str,
) -> None:
    monkeypatch.setenv("DFLOCKD_CLUSTER", "etcd://127.0.0.1:1")  # nobody is there
    assert main(["cluster", *arguments]) == 2
    output, errors = capfd.readouterr()
    assert output == ""
    [line] = errors.splitlines()
    assert line.startswith("dflockd cluster: ")
    assert error in line


async def test_a_shard_goes_to_nobody_who_is_not_alive(etcd: Etcd, servers: Servers) -> None:
    before = await servers.mapping()
    for node, error in (
        ("10.0.0.9:1", "node '10.0.0.9:1' is not alive: 10.0.0.1:6388, "),
        ("", "node '' is not alive: "),
    ):
        done = await command(etcd, servers, "move", "1", "--to", node)
        assert (done.returncode, done.stdout) == (1, "")
        [line] = done.stderr.splitlines()
        assert line.startswith("dflockd cluster: ")
        assert error in line
    assert await servers.mapping() == before


COMMANDS = [["status"], ["rebalance"], ["pin", "0"], ["unpin", "0"], ["move", "0", "--to", "a:1"]]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_settings_stand_before_the_command_or_behind_it(arguments: list[str]) -> None:
    url, prefix = ["--cluster", "etcd://a"], ["--cluster-prefix", "/p"]
    others = ["--cluster", "etcd://b", "--cluster-prefix", "/q"]
    for before, behind in (
        (url + prefix, []),
        ([], url + prefix),
        (url, prefix),
        (prefix, url),
        (others, url + prefix),
    ):
        parsed = commands.parse([*before, *arguments, *behind])
        assert (parsed.cluster, parsed.cluster_prefix) == ("etcd://a", "/p")
        assert parsed.cluster_ca is None


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
async def test_where_there_is_no_cluster_nothing_is_written(
    etcd: Etcd, store: Store, arguments: list[str]
) -> None:
    done = await command(etcd, Servers(store, "/typo"), *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "dflockd cluster: --cluster-prefix /typo: there is no cluster, for /typo/meta is not in etcd: "
        "no server was started with that prefix, or --cluster is another etcd\n"
    )
    assert (await store.get_prefix("/typo")).records == {}


async def test_pins_that_change_nothing_are_told(etcd: Etcd, servers: Servers) -> None:
    assert await output(etcd, servers, "pin", "0-9", "3") == "10 shards pinned\n"
    assert await output(etcd, servers, "pin", "8-11") == "2 shards pinned; 2 were already\n"
    assert await output(etcd, servers, "unpin", "11-12") == "1 shards unpinned; 1 were not\n"


async def test_a_shard_without_a_server_cannot_be_pinned(
    etcd: Etcd, servers: Servers, store: Store
) -> None:
    await store.txn([], [Put(f"{servers.prefix}/shard/{shard}", b",") for shard in (3, 4)])
    done = await command(etcd, servers, "pin", "0-9")
    assert (done.returncode, done.stdout) == (1, "")
    assert "2 of these shards have no server to be pinned to, the first of them 3" in done.stderr
    assert not any(record.pinned for record in (await servers.mapping()).records)


async def test_a_server_that_leaves_is_given_nothing(
    etcd: Etcd, servers: Servers, store: Store
) -> None:
    await store.txn([], [Put(f"{servers.prefix}/leaving/{NODES[1]}", b"x")])
    done = await command(etcd, servers, "move", "0", "--to", NODES[1])
    assert done.returncode == 1
    assert f"node '{NODES[1]}' leaves: {NODES[0]}, {NODES[2]} of " in done.stderr


async def test_without_a_living_server(etcd: Etcd, servers: Servers) -> None:
    for node in NODES:
        await servers.clusters[node].registration.end()
    text = await output(etcd, servers, "status")
    assert "0 served, 0 recovering, 0 moving, 256 of servers that are gone" in text
    assert "no server is alive: locks are neither granted nor renewed" in text
    done = await command(etcd, servers, "rebalance")
    assert (done.returncode, done.stderr) == (
        1,
        "dflockd cluster: no server is alive that shards could be moved to\n",
    )


def test_without_a_cluster() -> None:
    done = forkserver.run([sys.executable, "-m", "dflockd", "cluster", "status"], timeout=60)
    assert done.returncode == 2
    assert "--cluster is not set: write --cluster etcd://host:2379" in done.stderr
    down = forkserver.run(
        [sys.executable, "-m", "dflockd", "cluster", "--cluster", "etcd://127.0.0.1:1", "status"],
        timeout=60,
    )
    assert down.returncode == 1
    assert "no connection to etcd at 127.0.0.1:1 within 2 s" in down.stderr
