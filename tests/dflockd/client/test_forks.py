"""Forks at any moment: no copy of a connection is left to keep the parent's locks.

The forked children live on, and hold nothing; the parent dies, and the server frees what it held.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dflockd.client_support import Proxy, is_free, make_certificate, stats
from tests.dflockd.raw_server import PATIENCE, ServerProcess, eventually

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
    pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="there is no /proc here"),
]


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    server = ServerProcess()
    yield server
    server.end()


class Family:
    """A parent, and children that do nothing but live. Line by line: what the parent prints."""

    def __init__(self, program: str, *args: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", BEGINNING + program, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._came = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._came:
                self.lines.append(line.rstrip("\n"))
                self._came.notify_all()

    def wait_for(self, line: str) -> None:
        with self._came:
            assert self._came.wait_for(lambda: line in self.lines, PATIENCE), self.lines

    def say(self) -> None:
        """Let the parent go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill_parent(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def children_live(self, number: int) -> bool:
        children = [int(line.split()[1]) for line in self.lines if line.startswith("child ")]
        return len(children) == number and all(is_alive(child) for child in children)

    def end(self) -> None:
        """End them all: they are a group of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def is_alive(pid: int) -> bool:
    """Whether a process runs; its children are no children of this one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


BEGINNING = """
import os, sys, threading, time

def fork():
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    os.write(1, f"child {child}\\n".encode())
    return child

def say(line):
    os.write(1, f"{line}\\n".encode())
"""


@pytest.fixture
def families() -> Iterator[Callable[..., Family]]:
    """Start families; they end with the test."""
    begun: list[Family] = []

    def start(program: str, *args: object) -> Family:
        begun.append(Family(program, *args))
        return begun[-1]

    yield start
    for family in begun:
        family.end()


def freed(server: ServerProcess, *keys: str) -> None:
    """Check that the locks are free soon, because no connection is left."""
    eventually(lambda: all(is_free(server, key) for key in keys))
    eventually(lambda: stats(server)["connections"] == 0)


# One of the two clients alone: nobody has imported the other.

ONE_CLIENT = """
import asyncio

options = {"servers": [("127.0.0.1", int(sys.argv[2]))], "lease_ttl_s": 600}

async def main():
    from dflockd import client
    assert "dflockd.sync_client" not in sys.modules
    lock, idle = (client.DistributedLock(key, **options) for key in ("held", "idle"))
    await lock.acquire()
    async with idle:
        pass
    fork()
    say("forked")
    await asyncio.sleep(600)

def blocking():
    from dflockd import sync_client
    assert "dflockd.client" not in sys.modules or "asyncio" in sys.modules
    lock, idle = (sync_client.DistributedLock(key, **options) for key in ("held", "idle"))
    lock.acquire()
    with idle:
        pass
    fork()
    say("forked")
    time.sleep(600)

if sys.argv[1] == "sync":
    blocking()
elif sys.argv[1] == "asyncio":
    asyncio.run(main())
else:
    import uvloop
    uvloop.run(main())
"""


@pytest.mark.parametrize("face", ["sync", "asyncio", "uvloop"])
def test_only_one_of_the_clients_is_imported(
    server: ServerProcess, families: Callable[..., Family], face: str
) -> None:
    if face == "uvloop":
        pytest.importorskip("uvloop")
    family = families(ONE_CLIENT, face, server.port)
    family.wait_for("forked")
    assert not is_free(server, "held")
    family.kill_parent()
    assert family.children_live(1)
    freed(server, "held")
    assert family.children_live(1)


# A fork while a connection is being made.

CONNECTING = """
face, port, certificate, secret = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
import asyncio, ssl

options = {
    "servers": [("127.0.0.1", port)],
    "lease_ttl_s": 600,
    "ssl_context": ssl.create_default_context(cafile=certificate) if certificate else None,
    "auth_token": secret or None,
}

def blocking():
    from dflockd import sync_client
    lock = sync_client.DistributedLock("held", **options)
    threading.Thread(target=lambda: say(f"acquired {lock.acquire()}"), daemon=True).start()
    sys.stdin.readline()
    fork()
    say("forked")
    time.sleep(600)

async def not_blocking():
    from dflockd import client
    lock = client.DistributedLock("held", **options)
    acquiring = asyncio.create_task(lock.acquire())
    await asyncio.to_thread(sys.stdin.readline)
    fork()
    say("forked")
    say(f"acquired {await acquiring}")
    await asyncio.sleep(600)

if face == "sync":
    blocking()
elif face == "asyncio":
    asyncio.run(not_blocking())
else:
    import uvloop
    uvloop.run(not_blocking())
"""

faces = pytest.mark.parametrize("face", ["sync", "asyncio", "uvloop"])


@faces
@pytest.mark.parametrize("auth", [False, True])
def test_a_fork_within_the_handshake(
    start: Callable[..., ServerProcess],
    families: Callable[..., Family],
    tmp_path: Path,
    face: str,
    auth: bool,
) -> None:
    """The server is slow to answer the first bytes of TLS."""
    certificate, key = make_certificate(tmp_path)
    flags = ["--tls-cert", str(certificate), "--tls-key", str(key)]
    server = start(*flags, *(["--auth-token", "secret"] if auth else []))
    proxy = Proxy(server.port)
    try:
        proxy.withhold_replies()
        family = families(CONNECTING, face, proxy.port, certificate, "secret" if auth else "")
        eventually(lambda: proxy.accepted == 1)
        time.sleep(0.2)  # its first bytes are under way
        family.say()
        family.wait_for("forked")
        proxy.pass_on()
        family.wait_for("acquired True")
        _frees_with_the_parent(family, lambda: _is_free_over_tls(server, certificate, auth))
    finally:
        proxy.close()


def _is_free_over_tls(server: ServerProcess, certificate: Path, auth: bool) -> bool:
    raw = server.connect(context=ssl.create_default_context(cafile=str(certificate)))
    try:
        if auth:
            assert raw.ask("auth", "_", "secret") == "ok"
        return raw.ask("l", "held", 0) != "timeout"
    finally:
        raw.close()


def _frees_with_the_parent(family: Family, is_free: Callable[[], bool]) -> None:
    assert not is_free()
    family.kill_parent()
    assert family.children_live(1)
    eventually(is_free)
    assert family.children_live(1)


@faces
def test_a_fork_before_the_server_says_yes_to_the_secret(
    start: Callable[..., ServerProcess], families: Callable[..., Family], face: str
) -> None:
    server = start("--auth-token", "secret")
    proxy = Proxy(server.port)
    try:
        proxy.withhold_replies()
        family = families(CONNECTING, face, proxy.port, "", "secret")
        eventually(lambda: proxy.accepted == 1)
        time.sleep(0.2)
        family.say()
        family.wait_for("forked")
        proxy.pass_on()
        family.wait_for("acquired True")

        def is_free() -> bool:
            raw = server.connect()
            try:
                assert raw.ask("auth", "_", "secret") == "ok"
                return raw.ask("l", "held", 0) != "timeout"
            finally:
                raw.close()

        _frees_with_the_parent(family, is_free)
    finally:
        proxy.close()


class Crowded:
    """A port whose queue of connections is full, until there is room; then it leads to a server."""

    def __init__(self, server: ServerProcess) -> None:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        self.port: int = self._listener.getsockname()[1]
        self._target = server.port
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        # One more than fits leaves the last one, and whoever comes then, waiting for an answer.
        for _ in range(2):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", self.port))
            self._sockets.append(sock)

    def is_waited_for(self, pid: int) -> bool:
        """Whether a connection of that process waits for room."""
        ours = {f"socket:[{inode}]" for inode in self._in_vain()}
        found = set()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.add(str(descriptor.readlink()))
        return bool(ours & found)

    def _in_vain(self) -> set[str]:
        lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
        rows = [line.split() for line in lines]
        port = f"0100007F:{self.port:04X}"
        return {row[9] for row in rows if row[2] == port and row[3] == "02"}

    def make_room(self) -> None:
        for sock in self._sockets[1:]:
            sock.close()
        thread = threading.Thread(target=self._accept, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target), PATIENCE)
            far.settimeout(None)
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=_pump, args=(source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(PATIENCE)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@faces
def test_a_fork_while_the_server_accepts_nobody(
    server: ServerProcess, families: Callable[..., Family], face: str
) -> None:
    crowded = Crowded(server)
    try:
        family = families(CONNECTING, face, crowded.port, "", "")
        eventually(lambda: crowded.is_waited_for(family.process.pid))
        family.say()
        family.wait_for("forked")
        crowded.make_room()
        family.wait_for("acquired True")
        _frees_with_the_parent(family, lambda: is_free(server, "held"))
    finally:
        crowded.close()


# Forks at random moments.

BUSY = """
face, port, forks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
import asyncio, random

options = {"servers": [("127.0.0.1", port)], "lease_ttl_s": 600}
sys.setswitchinterval(1e-4)
held = []
enough = threading.Event()

def blocking():
    from dflockd import sync_client
    while not enough.is_set() and len(held) < 1500:
        lock = sync_client.DistributedLock(f"{os.getpid()}-{len(held)}", **options)
        assert lock.acquire()
        held.append(lock)

async def not_blocking():
    from dflockd import client
    while not enough.is_set() and len(held) < 1500:
        lock = client.DistributedLock(f"{os.getpid()}-{len(held)}", **options)
        assert await lock.acquire()
        held.append(lock)
    await asyncio.sleep(600)

def work():
    if face == "sync":
        blocking()
    elif face == "asyncio":
        asyncio.run(not_blocking())
    else:
        import uvloop
        uvloop.run(not_blocking())

threading.Thread(target=work, daemon=True).start()
while not held:
    time.sleep(0.001)
for _ in range(forks):
    before = len(held)
    time.sleep(random.uniform(0, 0.003))
    fork()
    while len(held) == before:  # the next comes in the middle of another connection
        time.sleep(0.0001)
enough.set()
time.sleep(0.2)
say("forked")
time.sleep(600)
"""


@faces
def test_forks_beside_a_thread_that_connects(
    server: ServerProcess, families: Callable[..., Family], face: str
) -> None:
    """Each lock that it takes has a connection of its own."""
    if face == "uvloop":
        pytest.importorskip("uvloop")
    forks = 40
    family = families(BUSY, face, server.port, forks)
    family.wait_for("forked")
    held = len(stats(server)["locks"])
    assert held > forks
    family.kill_parent()
    assert family.children_live(forks)
    eventually(lambda: not stats(server)["locks"])
    assert stats(server)["connections"] == 0
    assert family.children_live(forks)


LOOK_INTO = """
import socket
face, port = sys.argv[1], int(sys.argv[2])
import asyncio

options = {"servers": [("127.0.0.1", port)], "lease_ttl_s": 600}
if face == "sync":
    from dflockd.sync_client import DistributedLock
    locks = [DistributedLock(f"key-{n}", **options) for n in range(5)]
    for lock in locks:
        lock.acquire()
    # What is not the client's is not the client's to close.
    own = socket.create_connection(("127.0.0.1", port))
    r, w = os.pipe()
    if os.fork() == 0:
        own.sendall(b"ping\\n_\\n_\\n")
        os.write(w, own.recv(100))
        own.close()
        os.write(w, f"{[lock.held for lock in locks].count(True)}\\n".encode())
        os._exit(0)
    say(os.read(r, 100).decode().strip().replace("\\n", " "))
    os.wait()
    say([lock.release() for lock in locks].count(True))
"""


def test_a_child_keeps_what_is_not_the_clients(
    server: ServerProcess, families: Callable[..., Family]
) -> None:
    family = families(LOOK_INTO, "sync", server.port)
    family.wait_for("5")
    assert family.lines[0].startswith(("ok", "error"))
