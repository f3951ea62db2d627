"""A server with `--state-dir` that ends and comes back, as its clients see it: real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflockd import errors
from dflockd.client.process import close_idle_connections
from dflockd.wire import UNLIMITED, fence_from_token
from tests.dflockd.client_support import Calls, Client, client_named, soon, stats, until
from tests.dflockd.raw_server import PATIENCE, RawClient, ServerProcess, eventually, granted
from tests.dflockd.storage.test_directory import rewrite


class Site:
    """A server on one directory and one port, process after process."""

    def __init__(self, path: Path, *flags: str) -> None:
        self.path = path
        self._flags = ("--state-dir", str(path), "--max-locks", "10000", *flags)
        self._port = 0
        self.servers: list[ServerProcess] = []

    @property
    def server(self) -> ServerProcess:
        return self.servers[-1]

    @property
    def port(self) -> int:
        return self.server.port

    def start(self, *flags: str) -> ServerProcess:
        self.servers.append(ServerProcess(*self._flags, *flags, "--port", str(self._port)))
        self._port = self.server.port
        return self.server

    def connect(self) -> RawClient:
        return self.server.connect()

    def kill(self) -> None:
        self.server.signal(signal.SIGKILL)
        self.server.wait()

    def stop(self) -> None:
        self.server.signal(signal.SIGTERM)
        assert self.server.wait() == 0

    def restart(self, end: str = "kill") -> ServerProcess:
        self.stop() if end == "stop" else self.kill()
        return self.start()

    @property
    def file(self) -> dict[str, Any]:
        known: dict[str, Any] = json.loads((self.path / "state.json").read_bytes())
        return known

    def change_boot(self) -> None:
        """Make the last process one of another boot of the machine."""
        rewrite(self.path, boot="another")

    def end(self) -> None:
        for server in self.servers:
            server.end()


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    site = Site(tmp_path / "state", *getattr(request, "param", ()))
    try:
        site.start()
        yield site
    finally:
        site.end()
        close_idle_connections()


@pytest.fixture(params=["sync", "asyncio"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    with client_named(request.param) as client:
        yield client


def inspected(raw: RawClient, key: str, command: str = "i") -> dict[str, Any]:
    report: dict[str, Any] = json.loads(raw.ask(command, key).removeprefix("ok "))
    return report


def label_of(server: ServerProcess, key: str) -> str | None:
    labels = [held["label"] for held in stats(server)["locks"] if held["key"] == key]
    return labels[0] if labels else None


def is_owned(server: ServerProcess, key: str) -> bool:
    return any(held["owner_conn_id"] for held in stats(server)["locks"] if held["key"] == key)


def knows_server(lock: Any) -> bool:
    """Whether the client has its connection back; without, a release may come too early for it."""
    return bool(lock.state == "held")


async def all_back(server: ServerProcess, *locks: Any) -> None:
    """Wait until the server knows that the holders of locks live, and they know the server."""
    await until(lambda: all(is_owned(server, lock.key) for lock in locks))
    await until(lambda: all(map(knows_server, locks)))


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


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_what_is_shown_survives(site: Site, end: str) -> None:
    raw = site.connect()
    raw.ask("label", "_", "tasks.sync[1] on host")
    raw.lock("k", "0 100")
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
    raw.ask("owner", "_", "run-1 2")
    token = raw.lock("k", "0 100")
    site.restart(end)
    raw = site.connect()
    [holder] = inspected(raw, "k")["holders"]
    assert (holder["owner"], holder["attempt"]) == ("run-1", 2)
    raw.ask("owner", "_", "run-1 2")
    assert raw.ask("l", "k", "0 100") == "error_owner held 2"
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


# Recovery.

SHORT = ("--default-lease-ttl", "6")


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
        other = granted(raw.ask("sl", "s", "0 3"))
        assert raw.ask("sl", "s", "0 3") == "timeout"
        assert raw.ask("sr", "s", other) == "ok"
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


# Refusals, and the disk.


def test_a_second_server_is_refused(site: Site) -> None:
    second = Site(site.path)
    try:
        second.servers.append(ServerProcess("--state-dir", str(site.path)))
        assert second.server.wait() == 1
        [line] = second.server.log[-1:]
        assert "in use by another dflockd: give each its own" in line
        assert len(second.server.log) == 1
    finally:
        second.end()
    granted(site.connect().ask("l", "k", 0))


@pytest.mark.parametrize("site", [("--default-lease-ttl", "1")], indirect=True)
def test_a_damaged_journal_and_the_way_out(site: Site) -> None:
    token = site.connect().lock("k", "0 1")
    site.kill()
    [path] = site.path.glob("journal-*")
    data = bytearray(path.read_bytes())
    data[150] ^= 1
    path.write_bytes(data)
    refused = ServerProcess("--state-dir", str(site.path))
    try:
        assert refused.wait() == 1
        [line] = refused.log
        assert f"{path}: damaged at byte 128: start once with --state-recover" in line
    finally:
        refused.end()
    site.start("--state-recover")
    assert f"going on though {path}: damaged at byte 128" in "\n".join(site.server.log)
    raw = site.connect()
    assert raw.ask("n", "k", f"{token} 1") == "ok 1"
    eventually(lambda: not raw.ask("l", "x", 0).startswith("error_recovering"))


def test_a_server_that_cannot_write_grants_nothing(site: Site) -> None:
    raw = site.connect()
    token = raw.lock("k", "0 60")
    resource.prlimit(site.server.process.pid, resource.RLIMIT_FSIZE, (100, 100))
    # A longer lease must be on the disk before it is granted.
    assert raw.ask("l", "long", "0 1000") == ""
    assert site.server.wait() == 1
    assert "cannot write to the state directory: " in site.server.log[-1]
    assert "File too large" in site.server.log[-1]
    site.start()
    raw = site.connect()
    assert raw.ask("n", "k", f"{token} 60") == "ok 60"
    granted(raw.ask("l", "long", 0))


def test_a_server_that_cannot_write_ends_though_nobody_reads_its_log(tmp_path: Path) -> None:
    # It hung in its last line; or granted on, if it was the thread that syncs.
    path = tmp_path / "socket"
    reader, writer = os.pipe()
    flags = ["--port", "0", "--log-level", "ERROR", "--unix-socket", str(path)]
    flags += ["--host", "127.0.0.1", "--state-dir", str(tmp_path / "state")]
    process = subprocess.Popen([sys.executable, "-m", "dflockd", *flags], stderr=writer)
    try:
        eventually(path.exists)
        os.set_blocking(writer, False)
        for size in (4096, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writer, bytes(size))
        # This is a property of the pipe, which the server has as well.
        os.set_blocking(writer, True)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            raw = RawClient(sock)
            raw.lock("k")
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100, 100))
            assert raw.ask("l", "long", "0 1000") == ""
        assert process.wait(PATIENCE) == 1
    finally:
        process.kill()
        process.wait(PATIENCE)
        os.close(reader)
        os.close(writer)


def test_a_disk_that_fills_up_loses_nothing_that_was_granted(site: Site) -> None:
    raw = site.connect()
    raw.ask("label", "_", "x" * 256)
    resource.prlimit(site.server.process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    tokens: dict[str, str] = {}
    for batch in range(100):
        keys = [f"{batch}-{number}-{'y' * 200}" for number in range(200)]
        try:
            raw.send("".join(f"l\n{key}\n0 600\n" for key in keys).encode())
        except OSError:
            break
        lines = [raw.line() for _ in keys]
        tokens |= {key: granted(line) for key, line in zip(keys, lines, strict=True) if line}
        if not lines[-1]:
            break
    assert site.server.wait() == 1
    assert len(tokens) > 5000
    site.start()
    raw = site.connect()
    for key in random.sample(sorted(tokens), 500):
        assert raw.ask("n", key, f"{tokens[key]} 60") == "ok 60"


def test_the_secret_is_in_no_log(site: Site) -> None:
    site.connect().lock("k")
    secret = site.file["secret"]
    site.restart()
    site.restart("stop")
    site.stop()
    (site.path / "state.json").write_text(json.dumps(site.file)[:-1])
    refused = ServerProcess("--state-dir", str(site.path))
    refused.wait()
    refused.end()
    for server in [*site.servers, refused]:
        assert secret[:8] not in "\n".join(server.log)


# Kills at any moment.


class Burst(threading.Thread):
    """A client that takes, renews and gives back locks until its server is gone."""

    def __init__(self, raw: RawClient, name: str) -> None:
        super().__init__()
        self.raw = raw
        self.name = name
        self.held: dict[str, str] = {}
        self.unsure: set[str] = set()
        """Keys of requests whose answers never came."""
        self.chance = random.Random(name)
        self.start()

    def run(self) -> None:
        number = 0
        while True:
            number += 1
            key = f"{self.name}-{number % 50}"
            if key not in self.held:
                request = ("l", key, "0 600")
            elif self.chance.random() < 0.3:
                request = ("n", key, f"{self.held[key]} 600")
            else:
                request = ("r", key, self.held[key])
            self.unsure = {key}
            try:
                line = self.raw.ask(*request)
            except (OSError, AssertionError):
                return
            if not line:
                return
            assert line.startswith("ok"), (request, line)
            self.unsure = set()
            if request[0] == "l":
                self.held[key] = granted(line)
            elif request[0] == "r":
                del self.held[key]


def kill_at_random_moments(site: Site, times: int) -> None:
    chance = random.Random(times)
    fence = 0
    for turn in range(times):
        bursts = [Burst(site.connect(), f"{turn}-{number}") for number in range(3)]
        time.sleep(0.02 + 0.15 * chance.random())
        site.kill()
        for burst in bursts:
            burst.join()
        site.start()
        raw = site.connect()
        shown = {}
        for held in stats(site.server)["locks"]:
            shown[held["key"]] = held
        for burst in bursts:
            for key, token in burst.held.items():
                if key in burst.unsure:
                    continue
                fence = max(fence, fence_from_token(token))
                assert raw.ask("l", key, 0) == "timeout", key
                assert raw.ask("n", key, f"{token} 600") == "ok 600", key
            mine = {key for key in shown if key.startswith(burst.name + "-")}
            assert mine - burst.unsure == set(burst.held) - burst.unsure
        latest = fence_from_token(raw.lock(f"new-{turn}", "0 600"))
        assert latest > fence
        for key, held in shown.items():
            assert raw.ask("evict", key, inspected(raw, key)["holders"][0]["fence"]) == "ok", held


def test_a_kill_loses_nothing_that_somebody_was_told(site: Site) -> None:
    kill_at_random_moments(site, 4)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_many_kills_lose_nothing_that_somebody_was_told(site: Site) -> None:
    kill_at_random_moments(site, 100)


async def test_no_client_loses_a_lock_to_a_kill(site: Site, client: Client) -> None:
    lost = Calls()
    locks = [client.lock(f"k{n}", site.server, lease_ttl_s=10, on_lost=lost) for n in range(20)]
    for lock in locks:
        assert await lock.acquire()
    for _ in range(3):
        site.restart()
        await all_back(site.server, *locks)
    assert all(lock.held for lock in locks)
    for lock in locks:
        assert await lock.release()
    assert stats(site.server)["locks"] == []
    assert lost.times == []


async def test_what_is_released_while_the_server_is_away_is_free_when_it_is_back(
    client: Client, site: Site
) -> None:
    lock = client.lock("k", site, lease_ttl_s=60)
    await lock.acquire()
    site.kill()
    assert not await lock.release()
    site.start()
    other = client.lock("k", site)
    assert await other.acquire()
    await other.release()


async def test_detached_holds_do_not_make_the_wait_after_a_crash_longer(
    client: Client, site: Site
) -> None:
    running, queued = client.lock("r", site, lease_ttl_s=5), client.lock("q", site, lease_ttl_s=5)
    await running.acquire()
    await queued.acquire()
    assert await queued.detach(3600)
    site.kill()
    site.change_boot()
    assert site.file["longest_lease"] == 33
    site.start()
    with pytest.raises(errors.RecoveringError):
        await client.lock("new", site, acquire_timeout_s=0).acquire()
    assert site.file["longest_lease"] == 33
    # What reached the journal is there; nobody has to renew it.
    assert "q" in {lock["key"] for lock in stats(site.server)["locks"]}
    await running.release()


@pytest.mark.parametrize("site", [("--default-lease-ttl", "1")], indirect=True)
def test_a_rate_outlives_a_crash_of_the_machine_and_a_kill_after_it(site: Site) -> None:
    """Nothing on the disk knows of the key: its only record was lost with the machine."""
    asked = f"0 {UNLIMITED} 1 1/3600000"
    was_synced = {path: path.read_bytes() for path in site.path.glob("journal-*")}
    token = granted(site.connect().ask("sl", "k", asked))
    assert site.connect().ask("sbegun", "k", f"{token} 1").startswith("ok")
    site.kill()
    for path, content in was_synced.items():
        path.write_bytes(content)
    site.change_boot()
    site.start()
    for _ in range(2):
        # Locks are granted again, and nobody asks for a rate.
        eventually(lambda: site.connect().ask("l", "other", "0 1").startswith("ok"))
        site.restart()
    eventually(lambda: site.connect().ask("sl", "k", f"0 {UNLIMITED} 1").startswith("ok"))
    for key in ("k", "never-seen"):
        assert site.connect().ask("sl", key, asked) == "timeout"
