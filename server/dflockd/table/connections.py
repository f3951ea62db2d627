"""The connections of a table: what stands on them, and what happens to it when they end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

from dflockd.table.limits import STEP
from dflockd.table.line import ClientProcess
from dflockd.table.slots import Effect, Slots, answer_asking
from dflockd.table.state import Hold, Peer, Waiter
from dflockd.table.states import GONE, UNTOLD
from dflockd.wire import Status


class Connections:
    """How peers come and go, one by one and all at once."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.peers: dict[int, Peer] = {}
        self.processes: dict[bytes, ClientProcess] = {}
        """Of all connections that have said which they are, by instance."""
        self.draining = False
        """Whether nothing is granted any more to who comes."""
        self._keeps_holds = False
        self._last_peer = 0

    def connect(self) -> Peer:
        """Return a new peer. Its number is never used again."""
        self._last_peer += 1
        peer = self.peers[self._last_peer] = Peer(self._last_peer)
        return peer

    def introduce(self, peer: Peer, instance: bytes) -> None:
        """Take in whose process a connection is."""
        process = self.processes.get(instance)
        if process is None:
            process = self.processes[instance] = ClientProcess(instance)
        process.connections += 1
        peer.instance, peer.process = instance, process

    def disconnect(
        self, peer: Peer, now: float, *, clean: bool, silent: bool = False, told: bool = True
    ) -> list[Effect]:
        """Forget a peer whose connection has ended.

        If very much stands on it, a part of that stays held for some more steps, as `next_deadline`
        says.

        Args:
            peer: the peer.
            now: the time.
            clean: whether the other side closed it.
            silent: whether the other side was not heard of any more. It may run on, cut off, and
                believe in its locks until their leases end: so does the table.
            told: whether the answer to its last wait, if it has had one, was sent.
        """
        effects: list[Effect] = []
        # Before anything due now is granted: the peer is gone and cannot receive it.
        del self.peers[peer.id]
        peer.ended = True
        left: list[Waiter] = []  # behind them others may go on
        if told:
            peer.granted = None
        waiting = peer.waiting
        if isinstance(waiting, ClientProcess):
            waiting.asking = None
            self.slots.look_behind(waiting, now)
        elif waiting is not None and not waiting.is_told and self.slots.leave(waiting):
            left.append(waiting)
        peer.waiting = None
        for waiter in list(itertools.islice(peer.enqueued.values(), STEP)):
            # One that was told leaves a slot: after what falls due now.
            if not waiter.is_told and self._stand_down(waiter):
                left.append(waiter)
        self.slots.expire(now, effects)
        for waiter in left:
            self.slots.look_after(waiter, now, effects)
        last, peer.told = peer.told, None
        if last is not None and last.is_told and last.told_on is peer:
            # Its process may never have heard of it.
            self.slots.pass_on(last, now, effects)
        if peer.process is not None:
            peer.process.connections -= 1
            if not peer.process.connections:
                del self.processes[peer.instance]
        limits = self.slots.limits
        stays = self._keeps_holds or silent or peer.detaches or not limits.auto_release
        timeout = limits.orphan_ttl if limits.orphan_all or not clean else 0
        work = partial(self._part, stays, timeout)
        self.slots.in_steps(_all_of(peer), work, now, effects)
        return effects

    def _part(
        self, stays: bool, timeout: int, item: Hold | Waiter, now: float, effects: list[Effect]
    ) -> None:
        """Decide what happens to what stands on a peer that has ended."""
        if isinstance(item, Waiter):
            if self._stand_down(item):
                self.slots.look_after(item, now, effects)
            return
        peer = item.peer
        assert peer is not None
        # A grant that was never sent is held by nobody, whatever was planned for it.
        if not item.told or item is peer.granted:
            self.slots.give_place_back(item)
        elif stays or timeout:
            if not stays and item.deadline - now > timeout:
                self.slots.extend(item, timeout, now)
            item.peer = None
            del peer.holds[item]
            return
        self.slots.free(item, now, effects)

    def _stand_down(self, waiter: Waiter) -> bool:
        """Take out what a peer that has ended had enqueued; return the same as `Slots.leave`."""
        if waiter.hold is None:
            return self.slots.leave(waiter)
        self.slots.forget_waiter(waiter)
        waiter.hold.waiter = None
        waiter.state = GONE
        return False

    def drain(self, now: float, *, keep: bool = False) -> list[Effect]:
        """Send every waiter away, in steps; from now on only renewals and releases are handled.

        With `keep`, holds do not end with their connections any more: they are kept for later.
        """
        effects: list[Effect] = []
        self._keeps_holds = keep
        self.slots.expire(now, effects)
        self.draining = True
        self.slots.in_steps(self._all_to_drain(), self._send_home, now, effects)
        return effects

    def _all_to_drain(self) -> Iterator[Hold | Waiter | ClientProcess | Peer]:
        """Yield all who wait or ask; then the slots that nobody has heard of.

        Nobody can ask for these any more, and nobody is left to have them instead. A peer stands for
        the look at it: there can be very many that have nothing.
        """
        for peer in list(self.peers.values()):
            yield peer
            if peer.waiting is not None:
                yield peer.waiting
            yield from list(peer.enqueued.values())
        for peer in list(self.peers.values()):
            yield peer
            yield from [
                waiter.hold
                for waiter in peer.enqueued.values()
                if waiter.state == UNTOLD and waiter.hold is not None
            ]

    def _send_home(
        self, item: Hold | Waiter | ClientProcess | Peer, now: float, effects: list[Effect]
    ) -> None:
        """Take out who waits or asks, or a slot that nobody has heard of, if it is still there."""
        if isinstance(item, Peer):
            return
        if isinstance(item, ClientProcess):
            answer_asking(item, Status.DRAINING, effects)
        elif isinstance(item, Hold):
            if not item.ended:
                self.slots.free(item, now, effects)
        elif item.hold is None and item.state != GONE:
            if item.peer.waiting is item:
                effects.append((item.peer.id, Status.DRAINING))
            self.slots.leave(item)


def _all_of(peer: Peer) -> Iterator[Hold | Waiter]:
    """Yield what stands on a peer as long as there is something: first what it has enqueued."""
    while peer.enqueued:
        yield next(iter(peer.enqueued.values()))
    while peer.holds:
        yield next(iter(peer.holds))
