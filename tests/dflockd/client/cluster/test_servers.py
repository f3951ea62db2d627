"""Where clients of a cluster ask for a lock, and how they learn where."""

from __future__ import annotations

import os
import pickle
import threading
import time
from typing import Any

import pytest

from dflockd import errors, sync_client
from dflockd.wire import Acquire, Recovering, Release, Report, Shards, Status
from tests.dflockd.client.cluster.support import KEY, Make, is_granted
from tests.dflockd.client_support import Client, soon
from tests.dflockd.raw_server import PATIENCE
from tests.dflockd.scripted_server import ScriptedCluster, grant
from tests.pace import Pace

pytestmark = pytest.mark.usefixtures("no_idle_connections")


# Where a lock is asked for.


async def test_the_server_in_charge_is_asked(make: Make, cluster: ScriptedCluster) -> None:
    cluster.is_at(1)
    lock = make()
    assert lock.server == cluster.seeds
    async with lock:
        assert lock.held
        assert lock.server == str(cluster.servers[1])
        assert str(cluster.servers[1]) in repr(lock)
    assert cluster.servers[0].asked(Acquire, Release) == []
    assert [type(r) for r in cluster.servers[1].asked(Acquire, Release)] == [Acquire, Release]


async def test_the_map_is_loaded_once(make: Make, cluster: ScriptedCluster) -> None:
    for number in range(5):
        async with make(f"{KEY}-{number}"):
            pass
    assert cluster.loads() == 1
    assert make(KEY).server == str(cluster.servers[0])


async def test_semaphores_as_well(client: Client, cluster: ScriptedCluster) -> None:
    cluster.servers[0].script(Acquire, cluster.moved(KEY, 1))
    semaphore = client.module.DistributedSemaphore(KEY, 3, servers=cluster.seeds)
    semaphore = client._shaped(semaphore)
    async with semaphore:
        [request] = cluster.servers[1].asked(Acquire)
        assert (request.limit, request.key) == (3, KEY.encode())


async def test_a_seed_that_is_down(make: Make, cluster: ScriptedCluster) -> None:
    cluster.is_at(1)
    cluster.servers[0].stop()
    assert await is_granted(make(acquire_timeout_s=0))


async def test_nobody_is_there(make: Make, cluster: ScriptedCluster) -> None:
    cluster.stop()
    with pytest.raises(errors.UnreachableError, match="can be reached") as caught:
        await soon(make(acquire_timeout_s=600).acquire())
    assert (caught.value.key, caught.value.server) == (KEY, cluster.seeds)


async def test_the_cluster_goes_down(make: Make, cluster: ScriptedCluster) -> None:
    async with make("other"):
        pass
    cluster.stop()
    with pytest.raises(errors.UnreachableError, match="no server of cluster://"):
        await soon(make(acquire_timeout_s=600).acquire())


async def test_a_server_that_is_in_no_cluster(make: Make, cluster: ScriptedCluster) -> None:
    for server in cluster.servers:
        server.script(Shards, Status.ERROR)
    with pytest.raises(errors.RefusedError, match="is not in a cluster: start it with --cluster"):
        await make().acquire()


@pytest.mark.parametrize(
    "text",
    [
        b'{"servers": []}',
        b'{"servers": ["a:1"], "shards": [1], "epochs": [1]}',
        b'{"servers": ["a:1"], "shards": [0, 0], "epochs": [1]}',
        b'{"servers": ["a:1"], "shards": ["0"], "epochs": [1]}',
        b'{"servers": ["a:1"], "shards": [0.0], "epochs": [1]}',
        b'{"servers": ["a:1"], "shards": [0], "epochs": [null]}',
        b'{"servers": ["a:1"], "shards": [0], "epochs": {"0": 1}}',
        b'{"version": "0af3", "zlib": "AAAA"}',
        b'{"servers": ["a:x"], "shards": [0], "epochs": [1]}',
        b'{"servers": ["a:1"], "shards": [], "epochs": []}',
        b"{",
    ],
)
async def test_a_map_that_cannot_be_read(make: Make, cluster: ScriptedCluster, text: bytes) -> None:
    for server in cluster.servers:
        server.script(Shards, Report(text))
    with pytest.raises(errors.BadReplyError, match="its list of shards cannot be read"):
        await make().acquire()


async def test_a_server_that_says_the_same_of_nothing(make: Make, cluster: ScriptedCluster) -> None:
    for server in cluster.servers:
        server.script(Shards, Status.OK)
    with pytest.raises(errors.RefusedError, match="unexpected answer"):
        await make().acquire()


async def test_the_map_is_asked_for_by_its_version(make: Make, cluster: ScriptedCluster) -> None:
    """It is loaded twice more: once it is the same, once it is not."""
    first, second = cluster.servers
    async with make("other"):
        pass
    for owner, epoch in ((0, 7), (1, 8)):
        first.script(Acquire, Status.DRAINING, Status.DRAINING, grant)
        cluster.is_at(owner, epoch)
        loads = cluster.loads()
        assert await is_granted(make())
        assert cluster.loads() > loads
    assert make().server == str(second)
    versions = [request.version for server in cluster.servers for request in server.asked(Shards)]
    # Who is shutting down is asked last.
    assert len(set(versions) - {b""}) == 1, versions
    assert versions.count(b"") == 1, versions


# What belongs to the blocking client alone.


def test_cancel_while_it_pauses(cluster: ScriptedCluster) -> None:
    cluster.servers[0].script(Acquire, Recovering(500))
    lock = sync_client.DistributedLock(KEY, None, servers=cluster.seeds)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            lock.acquire()
        except BaseException as exc:
            caught.append(exc)

    thread = threading.Thread(target=wait)
    thread.start()
    cluster.servers[0].wait_asked(Acquire, 2)
    time.sleep(0.1)  # it has its answer by now, and half a second to wait
    with Pace() as pace:
        lock.cancel()
        thread.join(PATIENCE)
    assert pace.seconds < 0.3
    assert isinstance(caught[0], errors.AcquireCancelledError)


def test_a_fork_keeps_the_map(cluster: ScriptedCluster) -> None:
    with sync_client.DistributedLock(KEY, servers=cluster.seeds):
        pass
    pid = os.fork()
    if pid == 0:
        try:
            with sync_client.DistributedLock(KEY, servers=cluster.seeds):
                os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert cluster.loads() == 1
    assert len(cluster.servers[0].asked(Acquire)) == 2


def moved_error() -> errors.MovedError:
    return errors.MovedError(
        "it moved", shard=5, epoch=8, to="b:6388", place="p1", key=KEY, server="a:6388"
    )


# What is written.


def test_errors_survive_pickling() -> None:
    moved = pickle.loads(pickle.dumps(moved_error()))
    assert (str(moved), moved.shard, moved.epoch, moved.to) == ("it moved", 5, 8, "b:6388")
    assert (moved.place, moved.key, moved.server) == ("p1", KEY, "a:6388")
    recovering = errors.RecoveringError("not yet", retry_s=0.5, key=KEY)
    recovering = pickle.loads(pickle.dumps(recovering))
    assert (recovering.retry_s, recovering.key, recovering.server) == (0.5, KEY, None)


async def test_static_servers_follow_nothing(client: Client, cluster: ScriptedCluster) -> None:
    first, second = cluster.servers
    first.script(Acquire, cluster.moved(KEY, 1, epoch=8), Recovering(1500))
    servers = [str(first)]
    with pytest.raises(errors.MovedError, match=f"its shard .* is now on {second}: ") as caught:
        await client.lock(KEY, servers=servers).acquire()
    assert caught.value.to == str(second)
    with pytest.raises(errors.RecoveringError, match=r"try again in 1\.5 s") as not_yet:
        await client.lock(KEY, servers=servers).acquire()
    assert not_yet.value.retry_s == 1.5
    assert second.asked() == []


@pytest.mark.parametrize(
    ("servers", "text"),
    [
        ("cluster://", "name one or more servers"),
        ("cluster://a:1,,b:2", "name one or more servers"),
        ("cluster://a:1,a:1", "names one server twice"),
        ("cluster://a:x", "server 'a:x' is malformed"),
        ("cluster://a:1/", "server 'a:1/' is malformed"),
        (["cluster://a:1"], "is a cluster: give it alone"),
        ("a:6388", "give a list"),
    ],
)
def test_bad_seeds(client: Client, servers: Any, text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=text) as caught:
        client.lock(KEY, servers=servers)
    assert "\n" not in str(caught.value)


def test_a_sharding_strategy_is_refused(client: Client) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="remove it, a cluster has its own"):
        client.lock(KEY, servers="cluster://a:1", sharding_strategy=lambda key, number: 0)
    shown = client.lock(KEY, servers="cluster://a:1, b", auth_token="secret-word")
    assert shown.server == "cluster://a:1,b:6388"
    assert "secret-word" not in repr(shown)
