"""A server with `--state-dir` that ends and comes back, as its clients see it: real processes."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from dflockd import errors
from dflockd.storage import segment
from dflockd.storage.reading import name_of
from dflockd.wire import fence_from_token
from tests.dflockd.client_support import Calls, Client, client_named, soon, stats, until
from tests.dflockd.raw_server import ServerProcess, eventually, granted
from tests.dflockd.storage.recovery_support import Site, all_back, inspected, knows_server


def label_of(server: ServerProcess, key: str) -> str | None:
    labels = [held["label"] for held in stats(server)["locks"] if held["key"] == key]
    return labels[0] if labels else None


# Restarts.


@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_holders_keep_their_lock(site: Site, client: Client, end: str) -> None:
    lost = Calls()
    lock = client.lock("k", site.server, lease_ttl_s=30, label="the task", on_lost=lost)
    await lock.acquire()
    fences = [lock.fence]
    for _ in range(2):
        site.restart(end)
        raw = site.connect()
        assert raw.ask("l", "k", 0) == "timeout"
        fences.append(fence_from_token(raw.lock("other")))
        raw.close()
        await all_back(site.server, lock)
        assert label_of(site.server, "k") == "the task"
    assert lock.held
    assert await lock.release()
    assert site.connect().ask("l", "k", 0).startswith("ok")
    assert lost.times == []
    assert fences == sorted(set(fences))


@pytest.mark.parametrize("end", ["kill", "crash"])
async def test_holders_keep_their_lock_where_leases_are_shorter_by_now(
    site: Site, client: Client, end: str
) -> None:
    # Their next renewal asked for too much, and they took the answer for the end of the lock.
    lost = Calls()
    lock = client.lock("k", site, lease_ttl_s=3000, on_lost=lost)
    await lock.acquire()
    site.kill()
    if end == "crash":
        site.change_boot()
    site.start("--max-lease-ttl", "1000")
    for _ in range(2):
        await until(lambda: lock.held)
        assert await lock.renew() is True
        assert lock.lease == 1000
    # Nobody else gets so much.
    raw = site.connect()
    assert raw.ask("l", "other", "0 3000") == "error"
    if end == "kill":
        assert raw.ask("n", "other", f"{raw.lock('other', '0 60')} 3000") == "error"
    assert await lock.release() is True
    assert lost.times == []


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_what_is_shown_survives(site: Site, end: str) -> None:
    raw = site.connect()
    granted(raw.ask("acquire", "k", "timeout=0 lease=100 label=tasks.sync[1] on host"))
    time.sleep(0.3)
    [before] = inspected(raw, "k")["holders"]
    site.restart(end)
    raw = site.connect()
    [after] = inspected(raw, "k")["holders"]
    assert (after["label"], after["fence"]) == ("tasks.sync[1] on host", before["fence"])
    assert before["held_s"] <= after["held_s"] < before["held_s"] + 15
    assert before["lease_expires_in_s"] - 15 < after["lease_expires_in_s"]
    assert after["lease_expires_in_s"] < before["lease_expires_in_s"] + 0.2
    assert stats(site.server)["locks"][0]["held_s"] >= 0.3


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_run_is_known_again(site: Site, end: str) -> None:
    raw = site.connect()
    request = "timeout=0 lease=100 owner=run-1 attempt=2"
    token = granted(raw.ask("acquire", "k", request))
    site.restart(end)
    raw = site.connect()
    [holder] = inspected(raw, "k")["holders"]
    assert (holder["owner"], holder["attempt"]) == ("run-1", 2)
    assert raw.ask("acquire", "k", request) == "error_owner held 2"
    assert raw.ask("n", "k", f"{token} 100") == "ok 100"


def test_what_has_ended_stays_so(site: Site) -> None:
    raw = site.connect()
    token = raw.lock("released", "0 100")
    short = raw.lock("short", "0 1")
    closing = site.connect()
    closing.lock("closed", "0 100")
    assert raw.ask("r", "released", token) == "ok"
    closing.close()
    assert raw.ask("l", "closed", "5 100").startswith("ok")  # it is another's now
    begun = time.monotonic()
    site.kill()
    time.sleep(max(0.0, begun + 1.0 - time.monotonic()))
    site.start()
    raw = site.connect()
    assert raw.ask("n", "released", token) == "error"
    assert raw.ask("n", "short", short) == "error"
    granted(raw.ask("l", "released", 0))
    granted(raw.ask("l", "short", 0))
    assert raw.ask("l", "closed", 0) == "timeout"


def test_what_is_granted_is_soon_on_the_disk(site: Site) -> None:
    """If the machine ends, no more may be lost than of the last second or so."""
    granted(site.connect().ask("l", "k", "0 100"))
    identity, generation = bytes.fromhex(site.file["identity"]), site.file["generation"]
    name = site.path / name_of(generation, 1)

    def is_on_disk() -> bool:
        content = segment.parse(name.read_bytes(), identity, generation, 1)
        assert content is not None
        assert len(content.records) == 1
        return content.synced == content.end

    eventually(is_on_disk)


def test_semaphores_and_detached_holds(site: Site) -> None:
    raw = site.connect()
    tokens = [granted(raw.ask("sl", "sem", "0 3 60")) for _ in range(2)]
    raw.ask("stable-ref", "publisher")
    detached = raw.lock("detached", "0 60")
    raw.close()
    eventually(lambda: stats(site.server)["connections"] == 0)
    site.restart()
    raw = site.connect()
    assert raw.ask("n", "detached", f"{detached} 60") == "ok 60"
    assert raw.ask("sl", "sem", "0 2") == "error_limit_mismatch"
    granted(raw.ask("sl", "sem", "0 3"))
    assert raw.ask("sl", "sem", "0 3") == "timeout"
    site.restart()
    assert [site.connect().ask("sr", "sem", token) for token in tokens] == ["ok", "ok"]


async def test_detach_and_adopt_over_a_restart(site: Site, client: Client) -> None:
    lock = client.lock("k", site.server)
    await lock.acquire()
    token = await lock.detach(60)
    site.restart()
    worker = client.lock("k", site.server)
    assert await worker.adopt(token)
    assert await worker.release()


@pytest.mark.parametrize("site", [("--shutdown-timeout", "600")], indirect=True)
def test_a_clean_stop_waits_for_no_holder_and_sends_waiters_away(site: Site) -> None:
    holder, waiter = site.connect(), site.connect()
    token = holder.lock("k", "0 60")
    waiter.request("l", "k", "60 60")
    eventually(lambda: stats(site.server)["locks"][0]["waiters"] == 1)
    site.stop()
    assert waiter.line() == "error_draining"
    assert holder.line() == ""
    assert site.file["clean"] is True
    site.start()
    assert site.connect().ask("n", "k", f"{token} 60") == "ok 60"


async def test_a_waiter_gets_the_lock_after_the_restart(site: Site, client: Client) -> None:
    holder = client.lock("k", site.server)
    await holder.acquire()
    site.restart()
    await all_back(site.server, holder)
    waiter = client.lock("k", site.server)
    waiting = asyncio.ensure_future(waiter.acquire())
    await until(lambda: any(held["waiters"] for held in stats(site.server)["locks"]))
    assert await holder.release()
    assert await soon(waiting)
    await waiter.release()


SHORT = ("--default-lease-ttl", "6")


# Recovery.


@pytest.mark.parametrize("site", [SHORT], indirect=True)
async def test_after_a_crash_of_the_machine(site: Site) -> None:
    lost = Calls()
    with client_named("sync") as blocking, client_named("asyncio") as asynchronous:
        clients = (blocking, asynchronous)
        options: dict[str, Any] = {"lease_ttl_s": 6, "on_lost": lost}
        locks = [c.lock(c.name, site.server, label=f"the {c.name}", **options) for c in clients]
        slots = [c.semaphore("s", 3, site.server, **options) for c in clients]
        for lock in [*locks, *slots]:
            assert await lock.acquire()
        gone = site.connect()
        gone.lock("gone", "0 6")
        site.kill()
        site.change_boot()
        for path in site.path.glob("journal-*"):
            path.unlink()  # the worst case: there is nothing of it
        site.start("--state-recover")
        site.server.wait_for_log("nothing is granted for 6 s")
        raw = site.connect()
        for command, key, argument in (("l", "sync", "0"), ("e", "free", ""), ("sl", "s", "0 3")):
            name, milliseconds = raw.ask(command, key, argument).split(" ")
            assert name == "error_recovering"
            assert 0 < int(milliseconds) <= 6000
        for client in clients:
            with pytest.raises(errors.RecoveringError, match="try again in"):
                await client.lock("free", site.server).acquire()
        # Those who hold bring it back, with their labels.
        await all_back(site.server, *locks)
        for lock in locks:
            assert label_of(site.server, lock.key) == f"the {lock.key}"
        await until(lambda: not raw.ask("l", "gone", 0).startswith("error_recovering"))
        await until(lambda: all(map(knows_server, slots)))
        assert [raw.ask("l", lock.key, 0) for lock in locks] == ["timeout", "timeout"]
        other = granted(raw.ask("acquire", "s", "timeout=0 limit=3"))
        assert raw.ask("acquire", "s", "timeout=0 limit=3") == "timeout"
        assert raw.ask("r", "s", other) == "ok"
        assert lost.times == []
        fences = [lock.fence for lock in locks]
        for lock in [*locks, *slots]:
            assert lock.held
            assert await lock.release()
        assert fence_from_token(raw.lock("sync")) > max(fences)


@pytest.mark.parametrize("site", [SHORT], indirect=True)
def test_a_recovery_outlives_a_kill(site: Site) -> None:
    token = site.connect().lock("k", "0 6")
    site.kill()
    site.change_boot()
    site.start()
    assert site.connect().ask("l", "x", 0).startswith("error_recovering")
    site.restart()
    assert site.connect().ask("l", "x", 0).startswith("error_recovering")
    assert site.connect().ask("r", "k", token) == "ok"


def test_after_a_clean_end_of_the_machine_nobody_waits(site: Site) -> None:
    token = site.connect().lock("k", "0 60")
    site.stop()
    site.change_boot()
    site.start()
    raw = site.connect()
    assert raw.ask("l", "k", 0) == "timeout"
    granted(raw.ask("l", "free", 0))
    assert raw.ask("n", "k", f"{token} 60") == "ok 60"


def test_a_start_that_cannot_listen_is_no_end_of_the_machine(site: Site) -> None:
    # It left the directory as a kill does, and after a reboot everybody waited for nothing.
    token = site.connect().lock("k", "0 60")
    site.stop()
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = ServerProcess("--state-dir", str(site.path), "--port", str(other.getsockname()[1]))
        site.servers.append(server)
        assert server.wait() == 1
        assert "choose another --host or --port" in server.log[-1]
    site.change_boot()
    site.start()
    raw = site.connect()
    granted(raw.ask("l", "free", 0))
    assert raw.ask("n", "k", f"{token} 60") == "ok 60"
