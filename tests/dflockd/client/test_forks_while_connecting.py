"""Forks while a connection is being made: no copy of it is left to keep the locks of the parent."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dflockd.client.families import Family, StartFamily, faces, needs_forks
from tests.dflockd.client_support import is_free, make_certificate
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import PATIENCE, ServerProcess, StartServer, eventually

pytestmark = needs_forks


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    server = ServerProcess()
    yield server
    server.end()


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

run(face, blocking, not_blocking)
"""


@faces
@pytest.mark.parametrize(("tls", "secret"), [(True, ""), (True, "secret"), (False, "secret")])
def test_a_fork_before_the_server_has_answered(
    start: StartServer, families: StartFamily, tmp_path: Path, face: str, tls: bool, secret: str
) -> None:
    """The first bytes of TLS, or the secret."""
    certificate, key = make_certificate(tmp_path) if tls else ("", "")
    flags = ["--tls-cert", str(certificate), "--tls-key", str(key)] if tls else []
    server = start(*flags, *(["--auth-token", secret] if secret else []))
    context = ssl.create_default_context(cafile=str(certificate)) if tls else None

    def is_free() -> bool:
        with contextlib.closing(server.connect(context=context)) as raw:
            assert not secret or raw.ask("auth", "_", secret) == "ok"
            return raw.ask("l", "held", 0) != "timeout"

    with contextlib.closing(Proxy(server.port)) as proxy:
        proxy.withhold_replies()
        family = families(CONNECTING, face, proxy.port, certificate, secret)
        eventually(lambda: proxy.accepted == 1)
        time.sleep(0.2)  # its first bytes are under way
        family.say()
        family.wait_for("forked")
        proxy.pass_on()
        family.wait_for("acquired True")
        _frees_with_the_parent(family, is_free)


def _frees_with_the_parent(family: Family, is_free: Callable[[], bool]) -> None:
    assert not is_free()
    family.kill_parent()
    assert family.children_live(1)
    eventually(is_free)
    assert family.children_live(1)


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
    server: ServerProcess, families: StartFamily, face: str
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
