"""Simulated sockets, and connections of the client over them."""

from __future__ import annotations

import errno
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflockd.client.connection import Connection, Route
from dflockd.wire import (
    Granted,
    OwnerConflict,
    Recovering,
    Renewed,
    ReplyReader,
    RequestReader,
    Status,
    TimedOut,
    YourTurn,
    encode_reply,
    format_token,
)
from tests.dflockd.client.book import Peer

if TYPE_CHECKING:
    from tests.dflockd.client.homes import Home, Task
    from tests.dflockd.client.stage import Stage


class Wire:
    """A connection from end to end; for its client it is a socket."""

    def __init__(self, stage: Stage, home: Home, server: int) -> None:
        self.stage = stage
        self.peer = Peer(server)
        self.peer.reply = self._reply
        self.number = stage.open_descriptor(self)
        self.closed = False
        self.is_shut_down = False
        """Whether its client has ended it, whoever is still to close it."""
        self.gone = False
        """Whether its client can know that it has ended, ..."""
        self.seen = False
        """... and whether it does."""
        self.home = home
        self.user: Task | None = stage.current
        """Whose call has it at the moment, ..."""
        self.talking: Task | None = None
        """... and is talking on it."""
        self.link: Callable[[], FakeLink | None] = lambda: None
        """Not the link itself: a forgotten one closes its socket."""
        self._inbox = b""
        self._mute = stage.chance("mute")
        self._is_in_part = False
        self._listeners: list[Callable[[], object]] = []
        self._requests = RequestReader()
        self._last_up = self._last_down = 0.0
        stage.service.peers[self.peer] = None

    # What a socket can do.

    def send(self, data: bytes) -> int:
        self.stage.look_at_request(self, data)
        if self.has_ended:
            # Who has sent a part finds out when the rest can be sent that somebody has closed it.
            if not self._is_in_part:
                self.stage.wrong("step after close", f"{self} is sent {data!r}")
            raise OSError(errno.EBADF, "closed")
        if self.gone:
            self.seen = True
            raise BrokenPipeError
        sent = len(data)
        if self.stage.chance("partial"):
            sent = self.stage.rng.randrange(sent)
            self._is_in_part = True
            if not sent:
                raise BlockingIOError
        self._carry_up(data[:sent])
        return sent

    def recv(self, most: int) -> bytes:
        if self.closed:
            raise OSError(errno.EBADF, "closed")
        if self._inbox:
            data = self._inbox[:most]
            if self.stage.chance("partial"):
                data = data[: self.stage.rng.randint(1, len(data))]
            self._inbox = self._inbox[len(data) :]
            self.stage.heard(data)
            return data
        if not self.gone:
            raise BlockingIOError
        self.seen = True
        if self.stage.rng.random() < 0.5:
            raise ConnectionResetError
        return b""

    def shutdown(self, _: int) -> None:
        if self.closed:
            self.stage.wrong("step after close", f"{self} is shut down")
        self.is_shut_down = True
        self._carry_up(None)
        self._go()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.stage.close_descriptor(self)
            self._carry_up(None)

    def fileno(self) -> int:
        return -1 if self.closed else self.number

    # What the stage does.

    def __repr__(self) -> str:
        return f"wire {self.number} to {self.peer.server}"

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can come of it: its client has closed it, or somebody else there has."""
        link = self.link()
        return self.closed or (self.is_shut_down and (link is None or link.closed))

    @property
    def is_readable(self) -> bool:
        return not self.closed and (bool(self._inbox) or self.gone)

    def listen(self, listener: Callable[[], object]) -> None:
        self._listeners.append(listener)

    def break_off(self) -> None:
        """Both sides learn sometime that it is no more."""
        self.stage.soon(self._go, 1.0)
        self.stage.soon(lambda: self.stage.service.end(self.peer), 1.0)

    def _go(self) -> None:
        self.gone = True
        self._tell()

    def _tell(self) -> None:
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def _carry_up(self, data: bytes | None) -> None:
        if self._mute:
            return
        stage = self.stage
        if data is not None and stage.chance("cut_request"):
            data = data[: stage.rng.randrange(len(data))]
            self.break_off()
        self._last_up = when = max(self._last_up, stage.now + stage.rng.uniform(0.0001, 0.2))
        stage.at(when, lambda: self._arrive(data))

    def _arrive(self, data: bytes | None) -> None:
        stage = self.stage
        up_again = stage.stalled.get(self.peer.server, 0.0)
        if stage.now < up_again:
            stage.at(up_again, lambda: self._arrive(data))
        elif data is None:
            stage.service.end(self.peer)
        elif self.peer.alive and not self.gone:
            # What has been on its way when its client saw the end goes nowhere.
            self._requests.receive(data)
            while (request := self._requests.next_request()) is not None:
                self._answer(request)
            if stage.chance("mute"):
                self._mute = True

    def _answer(self, request: Any) -> None:
        stage = self.stage
        if stage.chance("lie"):
            self._reply(stage.rng.choice(YES))
        elif not stage.chance("refuse"):
            stage.service.receive(self.peer, request)
        else:
            self._reply(stage.some_refusal(self.peer.server))

    def _reply(self, reply: Any) -> None:
        stage = self.stage
        if self._mute:
            return
        line = reply if isinstance(reply, bytes) else encode_reply(reply)
        if stage.chance("cut_reply"):
            line = line[: stage.rng.randrange(len(line))]
            self.break_off()
        delay = stage.rng.uniform(0.5, 6.0) if stage.chance("slow") else stage.rng.random() * 0.2
        self._last_down = when = max(self._last_down, stage.now + delay)

        def come() -> None:
            self._inbox += line
            self._tell()

        stage.at(when, come)


YES = (
    Granted(format_token(1 << 40, b"lie"), 5),
    Renewed(5),
    Status.OK,
    Status.QUEUED,
    b"acquired 0000000000000000%032d 5\n" % 0,
)
NO = (
    *(status for status in Status if status not in (Status.OK, Status.QUEUED)),
    Recovering(100),
    OwnerConflict(b"held", 1),
    TimedOut(b"t0"),
    YourTurn(b"t0"),
    b"\xff\xfe\n",
    b"\n",
    b"ok ok ok ok\n",
    b"ok x\nok y\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
)


class FakeLink(Connection):
    """A connection whose socket is a `Wire`."""

    def __init__(self, wire: Wire, route: Route) -> None:
        self.route = route
        self.closed = False
        self.features = frozenset()
        self.pooled = False
        self.idle_since = 0.0
        self.rested = False
        self.guard = None
        self.asked_at = 0.0
        self.left = math.inf
        self.poll = None
        self.loop_reader = None
        self.reader = ReplyReader()
        self.is_tls = False
        self._watchers = []
        self._sock: Any = wire
        wire.link = weakref.ref(self)

    @property
    def wire(self) -> Wire:
        wire: Wire = self._sock
        return wire

    def has_come(self) -> bool:
        """The number of a wire is no descriptor: a poller would look at one of another test."""
        return self.wire.closed or self.wire.is_readable

    def __repr__(self) -> str:
        return f"link over {self._sock}"
