"""A TCP proxy: a bad network between a client and a server."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.dflockd.raw_server import PATIENCE, ServerProcess


class Proxy:
    """A TCP proxy that can cut connections, hold bytes back, and swallow everything."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[_Pair] = []
        self._changing = threading.Lock()
        """Of what there is, and of whether more may come: a connection could be made meanwhile."""
        self._threads: list[threading.Thread] = []
        self._requests_pass = threading.Event()
        self._replies_pass = threading.Event()
        self._swallowed: list[threading.Event] = []
        self.pass_on()
        self._closed = False
        self.accepted = 0
        self._start(self._accept)

    def cut(self, *, reset: bool) -> None:
        """End all connections on both sides: with a reset, or in an orderly way."""
        with self._changing:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.cut = True
            for sock in (pair.near, pair.far):
                with contextlib.suppress(OSError):
                    if reset:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        # A pump is still reading it: without this the reset would wait for more.
                        sock.shutdown(socket.SHUT_RD)
                    else:
                        sock.shutdown(socket.SHUT_RDWR)
                sock.close()

    def withhold(self) -> None:
        """Pass nothing on any more; the connections stay."""
        self._requests_pass.clear()
        self._replies_pass.clear()

    def withhold_requests(self) -> None:
        """Pass on only what the server says."""
        self._requests_pass.clear()

    def withhold_replies(self) -> None:
        """Pass on only what clients say."""
        self._replies_pass.clear()

    def swallow(self) -> None:
        """Pass nothing on any more on the connections that there are; new ones work."""
        self.withhold()
        self._swallowed += [self._requests_pass, self._replies_pass]
        self._requests_pass, self._replies_pass = threading.Event(), threading.Event()
        self.pass_on()

    def vanish(self) -> None:
        """Do so, and have the kernel acknowledge nothing either: as a host that is gone."""
        self.swallow()
        with self._changing:
            for pair in self._pairs:
                pair.near.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, _DROP_ALL)

    def pass_on(self) -> None:
        """Pass on what was held back, and all that comes."""
        self._requests_pass.set()
        self._replies_pass.set()

    def close(self) -> None:
        with self._changing:
            self._closed = True
        self.pass_on()
        for event in self._swallowed:
            event.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut(reset=False)
        for thread in self._threads:
            thread.join(PATIENCE)

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target), PATIENCE)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.accepted += 1
            pair = _Pair(near, far)
            with self._changing:
                if self._closed:
                    near.close()
                    far.close()
                    return
                self._pairs.append(pair)
            self._start(self._pump, pair, near, far, self._requests_pass)
            self._start(self._pump, pair, far, near, self._replies_pass)

    def _pump(
        self, pair: _Pair, source: socket.socket, sink: socket.socket, may_pass: threading.Event
    ) -> None:
        try:
            while data := source.recv(65536):
                may_pass.wait()
                sink.sendall(data)
            # What one side has ended, ends on the other.
            ended, how = [sink], socket.SHUT_WR
        except OSError:
            ended, how = [source, sink], socket.SHUT_RDWR
        if not pair.cut:
            for sock in ended:
                with contextlib.suppress(OSError):
                    sock.shutdown(how)


@dataclass
class _Pair:
    """The two ends of a connection that runs through a proxy."""

    near: socket.socket
    far: socket.socket
    cut: bool = False


_RESET = struct.pack("ii", 1, 0)

_ATTACH_FILTER = 26
"""``SO_ATTACH_FILTER`` of Linux, for which Python has no name."""

_DROP_ALL_CODE = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_DROP_ALL = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL_CODE))
"""A program of one instruction, which keeps no byte of what comes to a socket."""

Through = Callable[[ServerProcess], Proxy]
"""A function that starts a proxy in front of a server."""
