"""State directories that are refused, disks that fill up, and kills at any moment: real processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflockd import errors
from dflockd.wire import UNLIMITED, fence_from_token
from tests import forkserver
from tests.dflockd.client_support import Calls, Client, stats
from tests.dflockd.raw_server import PATIENCE, RawClient, ServerProcess, eventually, granted
from tests.dflockd.storage.recovery_support import Site, all_back, inspected

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
    assert f"continuing although {path}: damaged at byte 128" in "\n".join(site.server.log)
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
    process = forkserver.start([sys.executable, "-m", "dflockd", *flags], stderr=writer)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            # The path is there before anybody listens.
            eventually(lambda: not sock.connect_ex(str(path)))
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


BROKEN_JOURNAL = """
import asyncio
from dflockd.server import Server, ServerOptions
from dflockd.table import Limits, LockTable, TokenIssuer
from tests.dflockd.server.session_support import connect, prepare

class Journal:
    def record(self, changes, fence):
        raise MemoryError("no room for the record")

async def main():
    table = LockTable(Limits(), TokenIssuer(b"secret", 0), kept=True)
    server = Server(table, ServerOptions(host="127.0.0.1", port=0), Journal())
    prepare(server)
    transport = connect(server)
    try:
        transport.session.data_received(b"l\\nk\\n0\\n")
    finally:
        print("it goes on:", transport.written)

asyncio.run(main())
"""


def test_whatever_keeps_a_record_from_being_written_ends_the_server() -> None:
    # All but the disk's own errors cost one connection, and its lock was in the table alone.
    ended = subprocess.run(
        [sys.executable, "-m", "tests.dflockd.program", BROKEN_JOURNAL],
        check=False,
        cwd=forkserver.ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "cannot write to the state directory: no room for the record" in ended.stderr
    assert "in record" in ended.stderr, "where that was"


def test_a_disk_that_fills_up_loses_nothing_that_was_granted(site: Site) -> None:
    raw = site.connect()
    resource.prlimit(site.server.process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    tokens: dict[str, str] = {}
    for batch in range(100):
        keys = [f"{batch}-{number}-{'y' * 200}" for number in range(200)]
        try:
            said = f"timeout=0 lease=600 label={'x' * 256}"
            raw.send("".join(f"acquire\n{key}\n{said}\n" for key in keys).encode())
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


# Kills at any moment.


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
    unrated = f"timeout=0 limit={UNLIMITED} lease=1"
    asked = f"{unrated} rate=1/3600000"
    was_synced = {path: path.read_bytes() for path in site.path.glob("journal-*")}
    token = granted(site.connect().ask("acquire", "k", asked))
    begun = f"token={token} lease=1 how=begun"
    assert site.connect().ask("renew", "k", begun).startswith("ok")
    site.kill()
    for path, content in was_synced.items():
        path.write_bytes(content)
    site.change_boot()
    site.start()
    for _ in range(2):
        # Locks are granted again, and nobody asks for a rate.
        eventually(lambda: site.connect().ask("l", "other", "0 1").startswith("ok"))
        site.restart()
    eventually(lambda: site.connect().ask("acquire", "k", unrated).startswith("ok"))
    for key in ("k", "never-seen"):
        assert site.connect().ask("acquire", key, asked) == "timeout"
