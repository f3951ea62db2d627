"""etcd killed, restarted, silent: every call ends within its bound, and nothing is missed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import subprocess
import sys

import pytest
from aetcd import rpc

from dflockd import clock
from dflockd.errors import InvalidArgumentError
from dflockd.shards import (
    CompactedError,
    Get,
    Loaded,
    Put,
    Registration,
    RevisionIs,
    ShardMapper,
    StoreError,
    StoreUnreachableError,
    follow,
)
from dflockd.shards.etcd import EtcdStore
from tests.chaos.network import Network
from tests.dflockd.shards.etcd_process import Etcd

PATIENCE = 60
BOUND = 0.2
SLACK = 30
"""What a busy machine may add to a bound."""


@pytest.fixture
def own_etcd(tmp_path):
    """An etcd that the test may kill."""
    with Etcd(tmp_path) as etcd:
        yield etcd


@contextlib.asynccontextmanager
async def store_at(*etcds, timeout=BOUND):
    store = EtcdStore([e if isinstance(e, str) else e.endpoint for e in etcds], timeout=timeout)
    try:
        yield store
    finally:
        await store.close()


async def put(store, key, value=b"v"):
    return (await store.txn([], [Put(key, value)])).revision


async def eventually(call, *args):
    """Repeat a call until the store answers."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(StoreUnreachableError):
                return await call(*args)


class Follower:
    """Keeps what it is told of the store, and how often it was told everything."""

    def __init__(self, steps):
        self._steps = steps
        self.known = {}
        self.loads = 0

    async def until(self, **expected):
        """Go on until the keys have these values."""
        async with asyncio.timeout(PATIENCE):
            while self.known != {f"/{key}": value for key, value in expected.items()}:
                step = await anext(self._steps)
                if isinstance(step, Loaded):
                    self.known = {key: record.value for key, record in step.records.items()}
                    self.loads += 1
                else:
                    self.known |= {event.key: event.record.value for event in step}


def calls(store, lease, other_lease):
    return [
        store.get_prefix("/a"),
        store.grant_lease(5),
        store.keep_alive(lease),
        store.revoke_lease(other_lease),
        anext(store.watch("/a", 1)),
        *(store.txn([RevisionIs("/a", 0)], [Put("/a", b"")]) for _ in range(20)),
    ]


async def assert_all_end_within_their_bound(store, *leases):
    async with asyncio.timeout(3 * BOUND + SLACK):  # a watch is asked for a sign of life first
        outcomes = await asyncio.gather(*calls(store, *leases), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {StoreUnreachableError}
    assert all("etcd" in str(outcome) and "127.0.0.1:" in str(outcome) for outcome in outcomes)


async def test_etcd_killed_and_restarted(own_etcd):
    async with store_at(own_etcd) as store, store_at(own_etcd, timeout=PATIENCE) as other:
        leases = [(await eventually(store.grant_lease, 60)).id for _ in range(2)]
        mine = Registration(other, "/nodes/a", "mine", ttl=60)
        assert await mine.register()
        revision = await put(other, "/a", b"1")
        async with contextlib.aclosing(follow(store, "/a")) as steps:
            follower = Follower(steps)
            await follower.until(a=b"1")
            following = asyncio.ensure_future(follower.until(a=b"2"))
            own_etcd.kill()
            await assert_all_end_within_their_bound(store, *leases)
            own_etcd.start()
            # It still has everything, and leases go on.
            assert (await eventually(store.get_prefix, "/a")).records["/a"].revision == revision
            assert await eventually(mine.heartbeat)
            await eventually(put, other, "/a", b"2")
            await following
            assert follower.loads > 1


async def test_a_silent_etcd_does_not_hang_a_call(own_etcd):
    async with store_at(own_etcd) as store:
        leases = [(await eventually(store.grant_lease, 60)).id for _ in range(2)]
        own_etcd.pause()
        # The first ones on a connection that was fine, the others in search of one.
        await assert_all_end_within_their_bound(store, *leases)
        await assert_all_end_within_their_bound(store, *leases)
        own_etcd.resume()
        await eventually(store.keep_alive, leases[0])
        await eventually(put, store, "/a")


async def test_a_call_whose_connection_is_given_up_fails_and_does_not_vanish(own_etcd):
    store = EtcdStore([own_etcd.endpoint], timeout=PATIENCE)
    async with asyncio.timeout(PATIENCE):
        await store.txn([], [Put("/a", b"1")])
        own_etcd.pause()
        call = asyncio.ensure_future(store.txn([], [Put("/a", b"2")]))
        await asyncio.sleep(0)  # it is under way
        [member] = store._members
        await member.channel.close()  # as where another call was not answered
        with pytest.raises(StoreUnreachableError, match="given up"):
            await call
        call = asyncio.ensure_future(store.txn([], [Put("/a", b"3")]))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    own_etcd.resume()
    await store.close()


async def test_a_connection_that_was_closed_before_the_call_is_no_answer():
    async with store_at("127.0.0.1:1", timeout=PATIENCE) as store:
        store._make_members()
        [member] = store._members
        await member.channel.close()

        def ask(member, left):
            return member.kv.Range(rpc.RangeRequest(key=b"/a"), timeout=left)

        with pytest.raises(StoreUnreachableError, match="closed"):
            await store._answer(ask, member, clock.now() + PATIENCE)
        assert member not in store._members, "the next call has a new one"


async def test_a_watch_of_an_etcd_that_fell_silent_ends_and_what_was_missed_is_loaded(own_etcd):
    async with (
        store_at(own_etcd) as store,
        store_at(own_etcd, timeout=PATIENCE) as other,
        contextlib.aclosing(follow(store, "/a")) as steps,
        contextlib.aclosing(store.watch("/a", 1)) as watching,
    ):
        follower = Follower(steps)
        await put(other, "/a", b"early")
        await follower.until(a=b"early")
        assert await anext(watching)
        following = asyncio.ensure_future(follower.until(a=b"late"))
        own_etcd.pause()
        late = asyncio.ensure_future(put(other, "/a", b"late"))
        with pytest.raises(StoreUnreachableError, match="no sign of life"):
            await anext(watching)
        own_etcd.resume()
        await asyncio.gather(late, following)


async def test_a_watch_without_changes_goes_on(own_etcd):
    async with store_at(own_etcd) as store:
        revision = await eventually(put, store, "/b")
        async with contextlib.aclosing(store.watch("/a", revision)) as changes:
            waiting = asyncio.ensure_future(anext(changes))
            done, _ = await asyncio.wait([waiting], timeout=5 * BOUND)
            assert not done
            await eventually(put, store, "/a")
            async with asyncio.timeout(PATIENCE):
                assert [event.key for event in await waiting] == ["/a"]


async def test_changes_that_etcd_has_forgotten_are_an_error(own_etcd):
    async with store_at(own_etcd, timeout=PATIENCE) as store:
        for n in range(5):
            revision = await put(store, "/a", b"%d" % n)
        async with rpc.insecure_channel(own_etcd.endpoint) as channel:
            await rpc.KVStub(channel).Compact(rpc.CompactionRequest(revision=revision))
        with pytest.raises(CompactedError, match=f"before revision {revision}: load again"):
            await anext(store.watch("/a", 2))
        assert [event.record.value for event in await anext(store.watch("/a", revision))] == [b"4"]


async def test_a_transaction_may_have_less_time_than_others(own_etcd):
    async with store_at(own_etcd, timeout=PATIENCE) as store:
        await put(store, "/a")
        own_etcd.pause()
        async with asyncio.timeout(BOUND + SLACK):
            with pytest.raises(StoreUnreachableError):
                await store.txn([], [Put("/a", b"x")], timeout=BOUND)
        own_etcd.resume()


async def test_where_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
        async with store_at(endpoint) as store:
            with pytest.raises(StoreUnreachableError, match=f"no connection to etcd at {endpoint}"):
                await store.get_prefix("/a")


# several endpoints: two that are told apart by what they have


@pytest.fixture
def two(tmp_path):
    with Etcd(tmp_path, "first") as first, Etcd(tmp_path, "second") as second:
        yield first, second


async def name(store):
    """Which of the two answers."""
    return (await store.get_prefix("/name")).records["/name"].value


async def call_it(etcd):
    async with store_at(etcd, timeout=PATIENCE) as store:
        await put(store, "/name", etcd.name.encode())


async def test_a_reader_passes_over_an_endpoint_that_is_silent_and_one_that_is_dead(two):
    first, second = two
    await asyncio.gather(call_it(first), call_it(second))
    async with store_at(first, second, timeout=PATIENCE) as store:
        used = await name(store)
        now, other = (first, second) if used == b"first" else (second, first)
        # It stays with the one that answers.
        assert {await name(store) for _ in range(10)} == {used}
        now.kill()
        assert await name(store) == other.name.encode()
        now.start()
    async with store_at(first, second, timeout=2) as store:
        now, other = (
            (first, second) if await eventually(name, store) == b"first" else (second, first)
        )
        now.pause()
        assert await name(store) == other.name.encode()
        now.resume()


async def test_members_that_are_all_slow_answer_within_the_whole_time(own_etcd):
    network = Network()
    links = [network.link(own_etcd.port) for _ in range(3)]
    try:
        async with store_at(*(f"127.0.0.1:{link.port}" for link in links), timeout=9) as store:
            lease = await eventually(store.grant_lease, 600)
            for link in links:
                link.late = 4.0  # over a share of the time
            _, found = await asyncio.gather(store.keep_alive(lease.id), store.get_prefix("/"))
            assert found.records == {}
    finally:
        for link in links:
            link.close()
        network.close()


async def test_a_transaction_is_never_sent_twice_and_the_next_one_goes_elsewhere(two):
    first, second = two
    await asyncio.gather(call_it(first), call_it(second))
    async with store_at(first, second, timeout=1) as store:
        now, other = (
            (first, second) if await eventually(name, store) == b"first" else (second, first)
        )
        now.pause()
        with pytest.raises(StoreUnreachableError, match=now.endpoint):
            await put(store, "/a", b"lost")
        outcome = await eventually(store.txn, [], [Get("/name"), Get("/a")])
        assert {key: r.value for key, r in outcome.records.items()} == {
            "/name": other.name.encode()
        }
        now.resume()


async def test_an_endpoint_that_is_dead_from_the_start_costs_nothing(own_etcd):
    async with store_at("127.0.0.1:1", own_etcd, timeout=PATIENCE) as store:
        assert (await put(store, "/a")) > 1


# limits


async def test_more_than_grpc_takes_by_default_is_loaded(etcd_store, prefix):
    big = b"x" * 100_000
    for n in range(60):
        await put(etcd_store, f"{prefix}/{n}", big)
    loaded = await etcd_store.get_prefix(f"{prefix}/")
    assert sum(len(record.value) for record in loaded.records.values()) == 6_000_000
    async with contextlib.aclosing(etcd_store.watch(prefix, loaded.revision - 59)) as changes:
        seen = itertools.count(1)
        async for events in changes:
            if [next(seen) for _ in events][-1] == 60:
                break


@pytest.mark.parametrize("size", [1_700_000, 3_000_000])  # refused by etcd, and by its gRPC
async def test_a_value_that_etcd_refuses_changes_nothing(etcd_store, prefix, size):
    with pytest.raises(StoreError, match=r"refused: .*large") as caught:
        await put(etcd_store, f"{prefix}/a", b"x" * size)
    assert not isinstance(caught.value, StoreUnreachableError)
    assert (await etcd_store.get_prefix(prefix)).records == {}


@pytest.mark.parametrize("endpoints", ["127.0.0.1:2379", [], [""]])
async def test_endpoints_that_cannot_be(endpoints):
    with pytest.raises(InvalidArgumentError, match="endpoints is"):
        EtcdStore(endpoints)


@pytest.mark.parametrize("timeout", [0, -1])
async def test_a_timeout_that_cannot_be(timeout):
    with pytest.raises(InvalidArgumentError, match="timeout is"):
        EtcdStore(["127.0.0.1"], timeout=timeout)


async def test_an_endpoint_without_a_port_has_the_usual_one():
    store = EtcdStore(["a", "b:1", "[::1]", "[::1]:1"])
    assert store.endpoints == ("a:2379", "b:1", "[::1]:2379", "[::1]:1")


class Names(asyncio.DatagramProtocol):
    """A name server: every name has these addresses of IPv4."""

    def __init__(self):
        self.addresses = []

    def connection_made(self, transport):
        self._transport = transport

    def datagram_received(self, data, peer):
        end = data.index(b"\0", 12) + 5
        wanted = self.addresses if data[end - 4 : end - 2] == b"\0\x01" else []
        head = data[:2] + b"\x81\x80\0\x01" + len(wanted).to_bytes(2) + bytes(4)
        answers = (b"\xc0\x0c\0\x01\0\x01\0\0\0\0\0\x04" + socket.inet_aton(a) for a in wanted)
        self._transport.sendto(head + data[12:end] + b"".join(answers), peer)


@contextlib.asynccontextmanager
async def store_by_name(etcd, addresses):
    names = Names()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: names, ("127.0.0.1", 0))
    where = "{}:{}".format(*transport.get_extra_info("sockname"))
    names.addresses = addresses
    try:
        async with store_at(f"dns://{where}/etcd.example:{etcd.port}", timeout=1) as store:
            yield store
    finally:
        transport.close()


async def test_a_name_of_which_only_the_last_address_answers(etcd):
    async with store_by_name(etcd, ["127.0.0.3", "127.0.0.2", "127.0.0.1"]) as store:
        await eventually(store.grant_lease, 60)


async def test_a_name_that_gets_another_address(etcd):
    """It is looked up again soon: meanwhile no lock is granted."""
    addresses = ["127.0.0.2"]
    async with store_by_name(etcd, addresses) as store:
        with pytest.raises(StoreUnreachableError):
            await store.grant_lease(60)
        addresses[0] = "127.0.0.1"
        async with asyncio.timeout(20):  # gRPC's own pause is 30 s
            await eventually(store.grant_lease, 60)


# around it


def test_it_works_on_uvloop(etcd, prefix):
    uvloop = pytest.importorskip("uvloop")

    async def main():
        async with store_at(etcd, timeout=PATIENCE) as store:
            mapper = ShardMapper(store, prefix=prefix, num_shards=64)
            await mapper.store_shard_mapping(await mapper.create_shard_mapping(["a", "b"]))
            async with contextlib.aclosing(follow(store, prefix)) as steps:
                assert len((await anext(steps)).records) == 64
            return await mapper.get_node_for_shard(1)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == "b"


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_without_aetcd_it_says_what_to_install():
    done = python("import sys; sys.modules['aetcd'] = None; import dflockd.shards.etcd")
    assert "pip install 'dflockd-py[etcd]'" in done.stderr.splitlines()[-1]


def test_the_rest_needs_no_grpc():
    done = python("import sys, dflockd.shards; sys.exit('grpc' in sys.modules)")
    assert done.returncode == 0, done.stderr
