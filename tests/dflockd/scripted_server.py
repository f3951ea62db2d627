"""Lock servers that answer what a test tells them to, and write down what they were asked."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from dflockd.address import Address
from dflockd.client import process
from dflockd.shards import get_shard_id
from dflockd.wire import (
    FEATURES,
    Acquire,
    Auth,
    Granted,
    Hello,
    How,
    Moved,
    Ping,
    Release,
    Renew,
    Renewed,
    Reply,
    Request,
    RequestReader,
    Shards,
    Status,
    Welcome,
    encode_map,
    encode_reply,
    format_token,
)

NUM_SHARDS = 64

RESET = struct.pack("ii", 1, 0)
"""With this option a connection is reset when it is closed."""


class End:
    """Instead of a reply: the connection ends."""


class Silence:
    """Instead of a reply: none comes."""


class Last(bytes):
    """Bytes that are sent as they are, and then the connection ends."""


class Reset(Last):
    """The same, with a reset."""


Answer: TypeAlias = "Reply | bytes | type[End] | type[Silence] | Callable[[Request], Answer]"
"""Bytes are sent as they are, whether they are a reply or not."""

Kind: TypeAlias = "type | How"
"""Of a request: its class; a `Renew` that does more than that is of the kind of `How` it does it."""


def kind_of(request: Request) -> Kind:
    if isinstance(request, Renew) and request.how is not How.PLAIN:
        return request.how
    return type(request)


def _listen(port: int) -> socket.socket:
    """Listen where no client of this process still looks for a server of an earlier test."""
    looked_for = {route.address.port for route in process.current().pool.probes}
    with contextlib.ExitStack() as others:
        while True:
            listener = socket.create_server(("127.0.0.1", port))
            if port or listener.getsockname()[1] not in looked_for:
                return listener
            others.push(listener)


class ScriptedServer:
    """One server. `script` says what is answered: the next answer to each kind of request.

    The last answer to a kind repeats. Without any: grants, renewals and releases succeed.
    """

    def __init__(self, port: int = 0) -> None:
        self._listener = _listen(port)
        self.port: int = self._listener.getsockname()[1]
        self.address = Address("127.0.0.1", self.port)
        self.requests: list[tuple[int, Request]] = []
        """The number of the connection, and what came on it."""
        self.ended: list[int] = []
        """The numbers of the connections that clients have ended."""
        self.accepted = 0
        self._is_stopped = False
        self._script: dict[Kind, list[Answer]] = {}
        self._changed = threading.Condition()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __str__(self) -> str:
        return str(self.address)

    def script(self, kind: Kind, *answers: Answer) -> None:
        """Answer requests of a kind so from now on."""
        self._script[kind] = list(answers)

    def asked(self, *kinds: Kind) -> list[Any]:
        """Return the requests of these kinds; without kinds, all that are about a lock."""
        with self._changed:
            return [
                r
                for _, r in self.requests
                if (kind_of(r) in kinds if kinds else kind_of(r) not in _ASIDE)
            ]

    def wait_asked(self, kind: Kind, number: int = 1) -> None:
        """Wait until so many requests of a kind have come."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: sum(kind_of(r) is kind for _, r in self.requests) >= number, 15
            ), f"{self} was not asked {number} times for {kind}: {self.requests}"

    def say(self, line: bytes) -> None:
        """Send something that nobody asked for, on all connections."""
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.sendall(line)

    def cut(self) -> None:
        """End all connections."""
        sockets, self._sockets = self._sockets, []
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """End all connections, and accept no other."""
        self._is_stopped = True
        with contextlib.suppress(OSError):
            # Green threads that accept notice neither a shutdown nor a close.
            socket.create_connection(self.address, 1).close()
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(15)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if self._is_stopped:
                sock.close()
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(sock)
            self.accepted += 1
            thread = threading.Thread(target=self._serve, args=(sock, self.accepted), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        reader = RequestReader()
        with sock, contextlib.suppress(OSError):
            while data := sock.recv(65536):
                reader.receive(data)
                while (request := reader.next_request()) is not None:
                    answer = self._answer(number, request)
                    if answer is End:
                        return
                    if isinstance(answer, Reset):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    if answer is not Silence:
                        # A reply is a tuple or a status.
                        is_raw = isinstance(answer, bytes)
                        sock.sendall(answer if is_raw else encode_reply(answer))
                    if isinstance(answer, Last):
                        return
        self.ended.append(number)

    def _answer(self, number: int, request: Request) -> Any:
        with self._changed:
            self.requests.append((number, request))
            self._changed.notify_all()
            kind = kind_of(request)
            answers = self._script.get(kind) or [_DEFAULTS.get(kind, Status.ERROR)]
            answer: Any = answers.pop(0) if len(answers) > 1 else answers[0]
        while callable(answer) and not isinstance(answer, type):
            answer = answer(request)
        return answer


_fences = iter(range(1, 1 << 40))


def grant(request: Any) -> Granted:
    """Grant what is asked for."""
    return Granted(format_token(next(_fences), b"scripted"), request.lease or 33)


def renewed(request: Any) -> Renewed:
    return Renewed(request.lease or 33)


_DEFAULTS: dict[Kind, Any] = {
    Hello: Welcome(b"scripted", FEATURES),
    Acquire: grant,
    Renew: renewed,
    How.BEGUN: renewed,
    How.CONFIRM: renewed,
    How.DETACH: renewed,
    Release: Status.OK,
    Auth: Status.OK,
    Ping: Status.OK,
    Shards: Status.ERROR,
}
_ASIDE = (Hello, Auth, Ping, Shards)


class ScriptedCluster:
    """Some of them, which agree on which of them has which shard."""

    def __init__(self, number: int = 2) -> None:
        self.servers = [ScriptedServer() for _ in range(number)]
        self.epoch = 7
        self.is_at(0)

    @property
    def seeds(self) -> str:
        return "cluster://" + ",".join(map(str, self.servers))

    def report(
        self, owner: int | None, epoch: int, servers: Iterable[ScriptedServer] | None = None
    ) -> Answer:
        """What `shards` is answered where one server has all shards."""
        listed = list(self.servers if servers is None else servers)
        index = -1 if owner is None else listed.index(self.servers[owner])
        document = {
            "num_shards": NUM_SHARDS,
            "servers": list(map(str, listed)),
            "shards": [index] * NUM_SHARDS,
            "epochs": [epoch] * NUM_SHARDS,
        }
        return encode_map(document).answer  # type: ignore[return-value]

    def shared(self, owners: Iterable[int]) -> Answer:
        """What `shards` is answered where each shard is at the server with this number."""
        document = {
            "num_shards": NUM_SHARDS,
            "servers": list(map(str, self.servers)),
            "shards": list(owners),
            "epochs": [self.epoch] * NUM_SHARDS,
        }
        return encode_map(document).answer  # type: ignore[return-value]

    def is_at(self, owner: int | None, epoch: int | None = None) -> None:
        """Let all servers report that this one has all shards."""
        self.epoch = self.epoch if epoch is None else epoch
        for server in self.servers:
            server.script(Shards, self.report(owner, self.epoch))

    def moved(self, key: str, to: int, epoch: int | None = None, place: str = "") -> Moved:
        """The refusal that sends clients to another server."""
        shard, epoch = get_shard_id(key, NUM_SHARDS), self.epoch if epoch is None else epoch
        return Moved(shard, epoch, str(self.servers[to]).encode(), place.encode())

    def loads(self) -> int:
        """How often the map was asked for."""
        return sum(len(server.asked(Shards)) for server in self.servers)

    def stop(self) -> None:
        for server in self.servers:
            server.stop()
