"""Whether a server is reached where it says: what it finds there, and what becomes of that."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from dflockd.address import Address
from dflockd.cluster import front_door
from dflockd.cluster.front_door import FrontDoor, Tls
from dflockd.table import Identity
from examples.demo.stage import LockServer
from tests.chaos.network import Network
from tests.dflockd.cluster.stage import ClusterStage, FewShards
from tests.dflockd.ports import free_port
from tests.dflockd.raw_server import PATIENCE, RawClient, StartServer, eventually
from tests.dflockd.server.conftest import make_certificates
from tests.dflockd.shards.etcd_process import Etcd

SECRET = "not-for-strangers"

NONCE = "0123456789abcdef"

WRONG = "does not lead here: "


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def cluster(etcd: Etcd, tmp_path: Path) -> Iterator[ClusterStage]:
    """A cluster whose servers a test starts."""
    prefix = f"/{tmp_path.name}"
    times = {"serving_lease": 2, "max_lease": 3}
    stage = ClusterStage(tmp_path, etcd, number=0, prefix=prefix, kind=FewShards, **times)
    yield stage
    stage.close()


StartAt = Callable[..., LockServer]


@pytest.fixture
def start_at(cluster: ClusterStage, tmp_path: Path) -> Iterator[StartAt]:
    """Start a server of the cluster that says it is at an address; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(address: str, *args: str, port: int = 0) -> LockServer:
            arguments = cluster.arguments()
            flags = ("--advertise", address, "--default-lease-ttl", "3", *args)
            server = FewShards(tmp_path, *arguments, *flags, port=port, name=f"at-{port}")
            stack.callback(server.kill)
            server.start()
            return server

        yield start


# What it finds.


class Listener:
    """Somebody who listens, says something to everybody, and remembers what he was told."""

    def __init__(self, says: bytes, *, at_once: bool = False, port: int = 0) -> None:
        self.told = b""
        self._says = says
        self._at_once = at_once
        self._sock = socket.create_server(("127.0.0.1", port))
        self.address = Address("127.0.0.1", self._sock.getsockname()[1])
        self.asked = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._sock.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(PATIENCE)
                if self._at_once:
                    connection.sendall(self._says)
                self.told += connection.recv(4096)
                self.asked.set()
                if not self._at_once:
                    connection.sendall(self._says)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(PATIENCE)


def door(address: Address, *, tls: Tls | None = None) -> FrontDoor:
    return FrontDoor(address, Identity(b"key"), tls=tls, strict=True)


async def problem(address: Address, *, tls: Tls | None = None) -> str | None:
    looking = door(address, tls=tls)
    assert looking.problem is None
    assert await looking.look() is (looking.problem == "")
    return looking.problem


@pytest.mark.parametrize(
    ("says", "at_once", "found"),
    [
        (b"SSH-2.0-x\r\n", True, "something else answers there: b'SSH-2.0-x\\r\\n'"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False, "something else answers there: b'HTTP/1.1 400"),
        (b"ok\n", False, "something else answers there: b'ok\\n'"),
        (b"error\n", False, "another lock server answers there"),
        (b"error_auth\n", False, "another lock server answers there"),
        (b'ok {"proof":"x"}\n', False, "another lock server answers there"),
        (b"ok {}\n", False, "another lock server answers there"),
        (b"ok {\n", False, "something else answers there: b'ok {\\n'"),
        (b"ok {\"a\":" + b"[" * 1000 + b"\n", False, "something else answers there: b'ok {\"a\":[["),
        (b"x" * 9999, False, "something else answers there: an endless line"),
        (b"", False, "the connection is closed without an answer"),
    ],
)  # fmt: skip
async def test_somebody_else_answers(says: bytes, at_once: bool, found: str) -> None:
    listener = Listener(says, at_once=at_once)
    try:
        told = await problem(listener.address)
    finally:
        listener.close()
    assert told is not None
    assert told.startswith(found) or (at_once and "reset" in told)


async def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await problem(Address("127.0.0.1", free_port())) == "the connection is refused"
    found = await problem(Address("nowhere.invalid", 1))
    assert found
    assert "\n" not in found
    assert await problem(Address("a" * 70 + ".invalid", 1)) == "its name cannot be resolved"
    monkeypatch.setattr(front_door, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert await problem(Address(*silent.getsockname())) == "no answer within 0.2 s"


async def test_a_proof_is_worth_nothing_to_anybody_else() -> None:
    one, other = Identity(b"one"), Identity(b"other")
    assert one.prove(b"n") == one.prove(b"n") != one.prove(b"m")
    assert one.prove(b"n") != other.prove(b"n")


# What servers answer.


def test_a_server_that_is_in_no_cluster_proves_nothing(start: StartServer) -> None:
    open_, closed = start(), start("--auth-token", SECRET)
    assert open_.connect().ask("identify", "_", NONCE) == "error"
    assert closed.connect().ask("identify", "_", NONCE) == "error_auth"


def proof(line: str) -> str:
    status, _, text = line.partition(" ")
    assert status == "ok"
    (proof,) = json.loads(text).values()
    assert isinstance(proof, str)
    return proof


def test_it_answers_who_has_not_shown_the_secret_once(start_at: StartAt) -> None:
    port = free_port()
    server = start_at(f"127.0.0.1:{port}", "--auth-token", SECRET, port=port)
    server.wait_log("is in the cluster")

    def connect() -> RawClient:
        return RawClient(socket.create_connection(("127.0.0.1", port), PATIENCE))

    with contextlib.ExitStack() as stack:
        stranger, friend, malformed = (connect() for _ in range(3))
        for client in (stranger, friend, malformed):
            stack.callback(client.close)
        stranger.send(f"identify\n_\n{NONCE}\nidentify\n_\n{NONCE}\nl\nk\n0\n".encode())
        first = proof(stranger.line())
        assert stranger.line() == ""
        assert friend.ask("auth", "_", SECRET) == "ok"
        assert proof(friend.ask("identify", "_", NONCE)) == first
        assert proof(friend.ask("identify", "_", "another")) != first
        assert friend.ask("identify", "_", "no nonce") == "error"
        assert friend.ask("identify", "_", "n" * 65) == "error"
        assert malformed.ask("identify", "_", "no nonce") == "error_auth"
    server.wait_log("wrong or missing auth token")  # of the last one


# What becomes of it.


def test_a_server_that_is_not_found_there_does_not_join(
    cluster: ClusterStage, start_at: StartAt
) -> None:
    wrong = f"127.0.0.1:{free_port()}"
    server = start_at(wrong, "--http-port", "0")
    line = server.wait_log(WRONG)
    assert f"ERROR dflockd.cluster: --advertise {wrong} {WRONG}the connection is refused. " in line
    assert "does not join the cluster until it does. Correct --advertise; or set " in line
    assert "--advertise-check warn" in line
    assert cluster.mapping.nodes() == []
    url = server.wait_log("live page: ").rpartition("live page: ")[2].strip()
    with pytest.raises(OSError, match="503") as refused:
        urllib.request.urlopen(f"{url}readyz", timeout=PATIENCE)
    checks = {check["name"]: check for check in json.load(refused.value)["checks"]}  # type: ignore[arg-type]
    refused.value.close()  # type: ignore[attr-defined]
    assert not checks["joined"]["ok"]
    reason = "--advertise does not lead here: the connection is refused"
    assert (checks["advertised"]["ok"], checks["advertised"]["reason"]) == (False, reason)
    server.stop()
    assert server.log_text().count(WRONG) == 1


def test_it_joins_once_the_way_to_it_is_open(cluster: ClusterStage, start_at: StartAt) -> None:
    """A load balancer, or a name, that takes its time."""
    port, network = free_port(), Network()
    way = network.link(port)
    try:
        way.refuses = True
        server = start_at(f"127.0.0.1:{way.port}", port=port)
        server.wait_log(WRONG)
        assert cluster.mapping.nodes() == []
        way.refuses = False
        server.wait_log("is in the cluster")
    finally:
        way.close()
        network.close()


def test_another_server_is_told_from_itself(start_at: StartAt) -> None:
    port = free_port()
    start_at(f"127.0.0.1:{port}", port=port).wait_log("is in the cluster")
    copied = start_at(f"127.0.0.1:{port}")
    assert "another lock server answers there" in copied.wait_log(WRONG)


def test_one_address_of_several_servers_is_that_of_none(start_at: StartAt) -> None:
    """Something before them gives each in turn a connection."""
    network, ports = Network(), [free_port(), free_port()]
    way = network.link(ports[0])
    way.targets = itertools.cycle(ports)
    try:
        servers = [start_at(f"127.0.0.1:{way.port}", port=port) for port in ports]
        for server in servers:
            server.wait_log(f"{WRONG}another lock server answers there")
        assert not any("is in the cluster" in server.log_text() for server in servers)
    finally:
        way.close()
        network.close()


@pytest.mark.parametrize(("mode", "complains"), [("warn", True), ("off", False)])
def test_it_joins_all_the_same_if_that_is_wanted(
    start_at: StartAt, mode: str, complains: bool
) -> None:
    server = start_at(f"127.0.0.1:{free_port()}", "--advertise-check", mode)
    server.wait_log("is in the cluster")
    assert (WRONG in server.log_text()) is complains
    if complains:
        assert "--advertise-check off" in server.wait_log(WRONG)


def test_a_stranger_is_not_told_the_secret(start_at: StartAt) -> None:
    stranger = Listener(b"ok\n")
    try:
        server = start_at(str(stranger.address), "--auth-token", SECRET)
        server.wait_log(WRONG)
        assert stranger.asked.wait(PATIENCE)
    finally:
        stranger.close()
    assert stranger.told.startswith(b"identify\n_\n")
    assert SECRET.encode() not in stranger.told


@pytest.mark.parametrize("asks", [False, True])
def test_over_tls(start_at: StartAt, certificates: Path, asks: bool) -> None:
    port = free_port()
    flags = ["--tls-cert", str(certificates / "server.pem")]
    flags += ["--tls-key", str(certificates / "server.key"), "--auth-token", SECRET]
    if asks:
        flags += ["--tls-client-ca", str(certificates / "ca.pem")]
    server = start_at(f"127.0.0.1:{port}", *flags, port=port)
    server.wait_log("is in the cluster")
    # All servers of a cluster may have one certificate: that it is shown there proves little.
    copied = start_at(f"127.0.0.1:{port}", *flags)
    assert "another lock server answers there" in copied.wait_log(WRONG)
    assert "Traceback" not in server.log_text() + copied.log_text()


def test_over_tls_that_asks_for_certificates_of_another_authority(
    start_at: StartAt, certificates: Path, tmp_path: Path
) -> None:
    """It has none itself: the certificate that is shown there has to do."""
    others, third = tmp_path / "other", tmp_path / "third"
    for directory in (others, third):
        directory.mkdir()
        make_certificates(directory)
    port, wrong = free_port(), free_port()
    flags = ["--tls-cert", str(certificates / "server.pem")]
    flags += ["--tls-key", str(certificates / "server.key")]
    flags += ["--tls-client-ca", str(others / "ca.pem")]
    start_at(f"127.0.0.1:{port}", *flags, port=port).wait_log("is in the cluster")
    theirs = ["--tls-cert", str(third / "server.pem"), "--tls-key", str(third / "server.key")]
    ours = start_at(f"127.0.0.1:{port}", *theirs, *flags[4:], port=wrong)
    assert "another certificate than that of --tls-cert" in ours.wait_log(WRONG)


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FrontDoor]:
    monkeypatch.setattr(front_door, "EVERY", 0.01)
    looking = FrontDoor(Address("127.0.0.1", free_port()), Identity(b"key"), tls=None, strict=True)
    looking.problem = ""  # as if it had joined
    task = asyncio.ensure_future(looking.watch())
    yield looking
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_one_failure_is_not_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = iter([True, False, True, False, True])

    class Done(Exception):
        pass

    class Sometimes(FrontDoor):
        async def look(self) -> bool:
            for reached in looks:
                self.problem = "" if reached else "a hiccup"
                return reached
            raise Done

    monkeypatch.setattr(front_door, "EVERY", 0)
    looking = Sometimes(Address("h", 1), Identity(b"key"), tls=None, strict=True)
    looking.problem = ""
    with pytest.raises(Done):
        await looking.watch()
    assert not caplog.records


async def test_later_it_tells_what_has_changed(
    watched: FrontDoor, caplog: pytest.LogCaptureFixture
) -> None:
    def said(text: str) -> bool:
        return any(text in record.getMessage() for record in caplog.records)

    caplog.set_level("INFO", "dflockd.cluster")
    await asyncio.to_thread(eventually, lambda: said("and do not find this server there"))
    assert watched.problem == "the connection is refused"
    port, closed = watched._address.port, asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = (await reader.readuntil(b"\n_\n"), await reader.readline())[1].strip()
        writer.write(b'ok {"proof":"%b"}\n' % Identity(b"key").prove(nonce))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        closed.set()

    async with await asyncio.start_server(answer, "127.0.0.1", port):
        await asyncio.to_thread(eventually, lambda: said("reached again"))
        async with asyncio.timeout(PATIENCE):
            await closed.wait()
    assert watched.problem == ""
