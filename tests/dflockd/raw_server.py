"""A real lock server in a process, and a raw client for it."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil

from tests import forkserver

PATIENCE = 30.0
"""Seconds that a test waits for something that should come at once."""


class RawClient:
    """A socket that speaks in bytes and lines; every wait is bounded."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(PATIENCE)
        self._received = b""

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def request(self, command: str, key: str = "_", argument: object = "_") -> None:
        self.send(f"{command}\n{key}\n{argument}\n".encode())

    def line(self) -> str:
        """Return the next line without its end, ``""`` if the connection has ended."""
        while b"\n" not in self._received:
            try:
                data = self.sock.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                assert not self._received
                return ""
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def ask(self, command: str, key: str = "_", argument: object = "_") -> str:
        self.request(command, key, argument)
        return self.line()

    def lock(self, key: str, argument: object = 0) -> str:
        """Acquire a lock that must be granted and return its token."""
        return granted(self.ask("l", key, argument))

    def close(self) -> None:
        self.sock.close()

    def reset(self) -> None:
        """End the connection abnormally."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def granted(line: str) -> str:
    """Return the token of a reply that must be a grant."""
    fields = line.split(" ")
    assert fields[0] in ("ok", "acquired"), line
    assert len(fields) == 3, line
    return fields[1]


class ServerProcess:
    """A lock server in a process of its own."""

    def __init__(
        self,
        *flags: str,
        uvloop: bool = True,
        env: dict[str, str] | None = None,
        open_files: int | None = None,
    ) -> None:
        module = "dflockd" if uvloop else "tests.dflockd.without_uvloop"
        limited = ["sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh"] if open_files else []
        clean = {k: v for k, v in os.environ.items() if not k.startswith("DFLOCKD_")}
        self.process = forkserver.start(
            [*limited, sys.executable, "-m", module, "--host", "127.0.0.1", "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, **(env or {})},
        )
        self.log: list[str] = []
        self._clients: list[RawClient] = []
        self._logged = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._logged:
                self.log.append(line.rstrip("\n"))
                self._logged.notify_all()
        with self._logged:
            self._ended = True
            self._logged.notify_all()

    def wait_for_log(self, text: str) -> str:
        """Return what follows `text` in the first line of the log that has it."""

        def found() -> str | None:
            for line in self.log:
                if text in line:
                    return line.partition(text)[2]
            return None

        with self._logged:
            self._logged.wait_for(lambda: found() is not None or self._ended, PATIENCE)
        rest = found()
        assert rest is not None, f"{text!r} is not in the log: {self.log}"
        return rest

    @property
    def port(self) -> int:
        return int(self.wait_for_log("listening on 127.0.0.1:"))

    def connect(self, *, context: ssl.SSLContext | None = None, receive: int = 0) -> RawClient:
        """Return a new client; `receive` bounds the bytes that its kernel takes in."""
        sock = socket.socket()
        if receive:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        sock.settimeout(PATIENCE)
        try:
            sock.connect(("127.0.0.1", self.port))
            if context is not None:
                sock = context.wrap_socket(sock, server_hostname="127.0.0.1")
        except BaseException:
            sock.close()
            raise
        return self.adopt(sock)

    def adopt(self, sock: socket.socket) -> RawClient:
        """Return a client over `sock`, which is closed with the server."""
        client = RawClient(sock)
        self._clients.append(client)
        return client

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def suspend(self) -> None:
        """Stop it where it is, and return once it has stopped; SIGCONT lets it go on."""
        self.signal(signal.SIGSTOP)
        process = psutil.Process(self.process.pid)
        eventually(lambda: process.status() == psutil.STATUS_STOPPED)

    def wait(self) -> int:
        """Return the exit status of a server that ends by itself."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status

    def end(self) -> None:
        """Clear up: end the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connections of all its clients."""
        while self._clients:
            self._clients.pop().close()


StartServer = Callable[..., ServerProcess]


def eventually(what: Callable[[], bool]) -> None:
    """Wait until `what` is true."""
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
