"""The connections of a table: what stands on them, and what happens to it when they end."""

from __future__ import annotations

import itertools
from functools import partial

from dflockd.table.issuer import TokenIssuer
from dflockd.table.limits import STEP, Limits
from dflockd.table.line import Process
from dflockd.table.recovery import Recovery
from dflockd.table.slots import Effect
from dflockd.table.state import Hold, Peer, Waiter
from dflockd.table.states import GONE, UNTOLD
from dflockd.wire import Status


class Connections(Recovery):
    """How peers come and go, one by one and all at once."""

    def __init__(self, limits: Limits, issuer: TokenIssuer, *, kept: bool = False) -> None:
        super().__init__(limits, issuer, kept=kept)
        self._peers: dict[int, Peer] = {}
        self._last_peer = 0

    def connect(self) -> Peer:
        """Return a new peer. Its number is never used again."""
        self._last_peer += 1
        peer = self._peers[self._last_peer] = Peer(self._last_peer)
        return peer

    def _introduce(self, peer: Peer, instance: bytes) -> None:
        """Take in whose process a connection is."""
        process = self._processes.get(instance)
        if process is None:
            process = self._processes[instance] = Process(instance)
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
        del self._peers[peer.id]
        peer.ended = True
        if told:
            peer.granted = None
        waiting, peer.waiting = peer.waiting, None
        if isinstance(waiting, Process):
            waiting.asking = None
        elif waiting is not None and not waiting.is_told:
            peer.waiting = waiting
            self._leave(waiting)
        for waiter in list(itertools.islice(peer.enqueued.values(), STEP)):
            if not waiter.is_told:  # else that frees a slot: after what falls due now
                self._stand_down(waiter, now, effects)
        self._expire(now, effects)
        if peer.told is not None and peer.told.is_told:
            # Its process may never have heard of it.
            self._pass_on(peer.told, now, effects)
        if peer.process is not None:
            peer.process.connections -= 1
            if not peer.process.connections:
                del self._processes[peer.instance]
        job = partial(self._part_some, peer, clean, silent)
        if not job(now, effects):
            self._later(job, now)
        return effects

    def _part_some(
        self, peer: Peer, clean: bool, silent: bool, now: float, effects: list[Effect]
    ) -> bool:
        for waiter in list(itertools.islice(peer.enqueued.values(), STEP)):
            self._stand_down(waiter, now, effects)
        if not peer.enqueued:
            for hold in list(itertools.islice(peer.holds, STEP)):
                self._part(hold, peer, now, effects, clean=clean, silent=silent)
        return not (peer.enqueued or peer.holds)

    def _pass_on(self, waiter: Waiter, now: float, effects: list[Effect]) -> None:
        """Let others have the slot that is held for somebody; who was told is in line again."""
        if self._reservations.pass_on(waiter, now):
            self._promote(waiter.entry, now, effects)

    def _stand_down(self, waiter: Waiter, now: float, effects: list[Effect]) -> None:
        """Take out what a peer that has ended had enqueued."""
        if waiter.hold is None:
            entry, was_told = waiter.entry, waiter.is_told
            self._leave(waiter)
            if was_told and self._is_here(entry):
                self._promote(entry, now, effects)
        else:
            self._forget_waiter(waiter)
            waiter.hold.waiter = None
            waiter.state = GONE

    def drain(self, now: float, *, keep: bool = False) -> list[Effect]:
        """Send every waiter away; from now on only renewals and releases are handled.

        With `keep`, holds do not end with their connections any more: they are kept for later.
        """
        effects: list[Effect] = []
        # What connections held that have ended is free, and is not kept with what follows.
        while self.backlog:
            self._catch_up(now, effects)
        self._keeps_holds = keep
        self._expire(now, effects)
        self.draining = True
        for peer in self._peers.values():
            waiting = peer.waiting
            if isinstance(waiting, Process):
                waiting.asking = peer.waiting = None
            elif waiting is not None:
                self._leave(waiting)
            if waiting is not None:
                effects.append((peer.id, Status.DRAINING))
            for enqueued in list(peer.enqueued.values()):
                if enqueued.hold is None:
                    self._leave(enqueued)
        # Nobody can ask for these any more, and nobody is left to have them instead.
        for peer in self._peers.values():
            for enqueued in list(peer.enqueued.values()):
                if enqueued.state == UNTOLD and enqueued.hold is not None:
                    self._free(enqueued.hold, now, effects)
        return effects

    def _part(
        self,
        hold: Hold,
        peer: Peer,
        now: float,
        effects: list[Effect],
        *,
        clean: bool,
        silent: bool,
    ) -> None:
        """Decide what happens to a hold whose peer has ended."""
        limits = self.limits
        # A grant that was never sent is held by nobody, whatever was planned for it.
        if hold.told and hold is not peer.granted:
            if not limits.auto_release or peer.detaches or self._keeps_holds or silent:
                hold.peer = None
                del peer.holds[hold]
                return
            timeout = limits.orphan_ttl if limits.orphan_all or not clean else 0
            if timeout:
                if hold.deadline - now > timeout:
                    self._extend(hold, timeout, now)
                hold.peer = None
                del peer.holds[hold]
                return
        else:
            self._give_place_back(hold)
        self._free(hold, now, effects)
