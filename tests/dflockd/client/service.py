"""A model of a lock service: who holds one key, as one server or some of a cluster say.

It knows no sockets and is never wrong by itself: what it has granted is the truth that the sessions
of a test are measured by. What becomes of its replies on their way is the stage's business.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from dflockd.address import Address
from dflockd.shards import get_shard_id
from dflockd.wire import (
    FEATURES,
    Acquire,
    Enqueue,
    Enqueued,
    Granted,
    Hello,
    How,
    Inspect,
    Moved,
    Pass,
    Queued,
    Recovering,
    Release,
    Renew,
    Renewed,
    Report,
    Shards,
    Status,
    TimedOut,
    Wait,
    Welcome,
    encode_map,
    format_token,
)
from tests.dflockd.client.book import Ended, Hold, Peer, Stage, Waiter

KEY = b"k"
NUM_SHARDS = 8
DEFAULT_LEASE = 33
TICKET_KEPT = 10.0


class Service:
    """One server, or a cluster of which one has the key.

    Args:
        stage: the time.
        addresses: of the servers.
        is_cluster: whether they know of one another.
        limit: how many may hold the key.
    """

    def __init__(
        self, stage: Stage, addresses: list[Address], *, is_cluster: bool, limit: int
    ) -> None:
        self.stage = stage
        self.addresses = addresses
        self.is_cluster = is_cluster
        self.limit = limit
        self.holds: dict[bytes, Hold] = {}
        self.ended: dict[bytes, Ended] = {}
        self.queue: list[Waiter] = []
        self.tickets: dict[bytes, Waiter] = {}
        self.peers: dict[Peer, None] = {}
        self.owner = 0
        self.epoch = 5
        self.is_moving = False
        self.down: set[int] = set()
        self._numbers = itertools.count(1)

    # What happens to it.

    def end(self, peer: Peer, why: str = "parted") -> None:
        """A connection has ended."""
        if peer.alive:
            peer.alive = False
            self.peers.pop(peer, None)
            for hold in [hold for hold in self.holds.values() if hold.peer is peer]:
                self._end(hold, why)
            self.queue = [waiter for waiter in self.queue if waiter.peer is not peer]
            self.serve()

    def evict(self) -> None:
        """An operator ends a hold."""
        for hold in list(self.holds.values())[:1]:
            self._end(hold, "evicted")
        self.serve()

    def restart(self, *, keeps: bool) -> list[Peer]:
        """The server in charge ends; return its connections."""
        ended = [peer for peer in self.peers if peer.server == self.owner]
        for peer in ended:
            peer.alive = False
            self.peers.pop(peer, None)
        for hold in list(self.holds.values()):
            if keeps:
                hold.peer = None
            else:
                self._end(hold, "forgotten")
        self.queue, self.tickets = [], {}
        return ended

    def begin_move(self) -> None:
        """Nobody is in charge for a moment; those who wait are told at once."""
        self.is_moving = True

    def end_move(self, to: int) -> None:
        """Another server is in charge, and knows what the old one knew."""
        self.is_moving = False
        self.owner, self.epoch = to, self.epoch + 1
        for hold in self.holds.values():
            hold.peer = None
        for waiter in list(self.queue):
            peer, waiter.peer = waiter.peer, None
            if peer is None or peer.server == to:
                waiter.peer = peer
                continue
            ticket = self._ticket(waiter)
            if waiter.asks:
                waiter.asks = False
                peer.reply(self._moved(ticket))
            peer.place = None
        self.serve()

    # What it is asked.

    def receive(self, peer: Peer, request: Any) -> None:
        """Take in a request; the reply comes now, later, or never."""
        handle = self._ABOUT.get(type(request))
        if handle is None:
            peer.reply(self._aside(peer, request))
        elif self.is_cluster and peer.server != self.owner:
            peer.reply(self._moved(b""))
        elif self.is_moving:
            peer.reply(Recovering(100))
        else:
            handle(self, peer, request)

    def _aside(self, peer: Peer, request: Any) -> Any:
        if isinstance(request, Shards):
            if not self.is_cluster:
                return Status.ERROR
            document = {
                "num_shards": NUM_SHARDS,
                "servers": list(map(str, self.addresses)),
                "shards": [-1 if self.is_moving else self.owner] * NUM_SHARDS,
                "epochs": [self.epoch] * NUM_SHARDS,
            }
            return encode_map(document).answer(request)
        if isinstance(request, Inspect):
            return Report(b'{"key": "k", "limit": 1, "holders": [], "waiters": []}')
        return Welcome(b"simulated", FEATURES) if isinstance(request, Hello) else Status.OK

    def _acquire(self, peer: Peer, request: Acquire) -> None:
        waiter = self._line_up(peer, request)
        waiter.asks, waiter.reserves = True, request.reserve is not None
        self.serve()
        if waiter.asks:
            self._await(waiter, request.timeout)

    def _enqueue(self, peer: Peer, request: Enqueue) -> None:
        if peer.place is not None:
            peer.reply(Status.ALREADY_ENQUEUED)
            return
        peer.place = waiter = self._line_up(peer, request)
        waiter.wants_turn = request.turn is not None
        self.serve()
        hold = waiter.hold
        if waiter.wants_turn:
            peer.reply(Queued(self._name(waiter)))
        else:
            peer.reply(Status.QUEUED if hold is None else Enqueued(hold.token, hold.lease))

    def _wait(self, peer: Peer, request: Wait) -> None:
        waiter = peer.place
        if waiter is None:
            peer.reply(Status.NOT_ENQUEUED)
        elif waiter.hold is not None:
            peer.place = None
            hold = waiter.hold
            is_there = self.holds.get(hold.token) is hold
            if is_there:
                self._start(hold, hold.lease)
            peer.reply(Granted(hold.token, hold.lease) if is_there else Status.LEASE_EXPIRED)
        else:
            waiter.asks, waiter.reserves = True, request.reserve is not None
            self._await(waiter, request.timeout)

    def _pass(self, peer: Peer, request: Pass) -> None:
        waiter = self.tickets.get(request.ticket)
        peer.reply(Status.OK if waiter in self.queue else Status.ERROR)

    def _renew(self, peer: Peer, request: Renew) -> None:
        if request.how is How.DETACH:
            self._detach(peer, request)
            return
        hold = self.holds.get(request.token)
        if hold is None:
            is_certain = request.how is How.CONFIRM
            peer.reply(Status.LEASE_EXPIRED if is_certain else Status.ERROR)
            return
        hold.peer = peer
        self._start(hold, request.lease)
        peer.reply(Renewed(hold.lease))

    def _detach(self, peer: Peer, request: Renew) -> None:
        hold = self.holds.get(request.token)
        if hold is None or hold.peer not in (peer, None):
            peer.reply(Status.LEASE_EXPIRED)
            return
        hold.peer = None
        self._start(hold, request.lease)
        peer.reply(Renewed(hold.lease))

    def _release(self, peer: Peer, request: Release) -> None:
        hold = self.holds.get(request.token)
        if hold is None:
            peer.reply(Status.ERROR)
            return
        self._end(hold, "released")
        peer.reply(Status.OK)
        self.serve()

    _ABOUT: dict[type, Callable[[Any, Peer, Any], None]] = {  # noqa: RUF012 - of the class
        Acquire: _acquire,
        Enqueue: _enqueue,
        Wait: _wait,
        Pass: _pass,
        Renew: _renew,
        Release: _release,
    }

    # Its book.

    def serve(self) -> None:
        """Grant what is free."""
        for waiter in list(self.queue):
            peer = waiter.peer
            if len(self.holds) >= self.limit:
                return
            if peer is None or waiter.wants_turn:
                continue
            self.queue.remove(waiter)
            token = format_token(next(self._numbers), b"stage")
            hold = waiter.hold = self.holds[token] = Hold(token, peer, waiter.lease, 0.0)
            self._start(hold, waiter.lease)
            if waiter.asks:
                waiter.asks = False
                peer.place = None
                peer.reply(Granted(token, hold.lease))

    def _line_up(self, peer: Peer, request: Acquire | Enqueue) -> Waiter:
        waiter = self.tickets.pop(request.ticket, None)
        if waiter is None or waiter not in self.queue:
            waiter = Waiter(peer, request.lease or DEFAULT_LEASE)
            self.queue.append(waiter)
        if waiter.peer is not None:
            waiter.peer.place = None
            if waiter.asks:
                waiter.peer.reply(Status.NOT_ENQUEUED)
        waiter.peer, waiter.asks, waiter.wants_turn = peer, False, False
        return waiter

    def _await(self, waiter: Waiter, seconds: float) -> None:
        peer = waiter.peer
        assert peer is not None

        def over() -> None:
            if waiter.peer is not peer or not waiter.asks or not peer.alive:
                return
            waiter.asks, peer.place = False, None
            if waiter.reserves:
                waiter.peer = None
                peer.reply(TimedOut(self._ticket(waiter)))
            else:
                self.queue.remove(waiter)
                peer.reply(Status.TIMEOUT)

        self.stage.at(self.stage.now + seconds, over) if seconds else over()

    def _name(self, waiter: Waiter) -> bytes:
        ticket = b"t%d" % next(self._numbers)
        self.tickets[ticket] = waiter
        return ticket

    def _ticket(self, waiter: Waiter) -> bytes:
        """Return a ticket of somebody who is away: it is good for a while."""
        ticket = self._name(waiter)
        waiter.wants_turn = False

        def forget() -> None:
            was_known = self.tickets.pop(ticket, None) is not None
            # Who is back by another ticket has their place on a connection.
            if was_known and waiter.peer is None and waiter in self.queue:
                self.queue.remove(waiter)

        self.stage.at(self.stage.now + TICKET_KEPT, forget)
        return ticket

    def _moved(self, ticket: bytes) -> Moved:
        shard = get_shard_id(KEY.decode(), NUM_SHARDS)
        return Moved(shard, self.epoch, str(self.addresses[self.owner]).encode(), ticket)

    def _start(self, hold: Hold, lease: int | None) -> None:
        hold.lease = lease or DEFAULT_LEASE
        hold.deadline = deadline = self.stage.now + hold.lease

        def over() -> None:
            if self.holds.get(hold.token) is hold and hold.deadline == deadline:
                self._end(hold, "expired")
                self.serve()

        self.stage.at(deadline, over)

    def _end(self, hold: Hold, why: str) -> None:
        del self.holds[hold.token]
        self.ended[hold.token] = Ended(why, hold.peer)
