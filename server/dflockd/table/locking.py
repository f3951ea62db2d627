"""The requests for a slot: to take one, to wait for it, to keep it and to release it.

Each is a method with plain arguments that returns what to answer; a `Hold` stands for its grant.
`dflockd.table.LockTable` takes messages instead.

Keys come as they were sent. One that is here was looked at when it came; any other is looked at before
anything else is done about it.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from dflockd import wire
from dflockd.table import owners
from dflockd.table.newest import OLDEST
from dflockd.table.rates import Rate
from dflockd.table.slots import Effect
from dflockd.table.state import Ahead, Entry, Group, Hold, Peer, Waiter
from dflockd.table.states import EXPECTED, GONE, GRANTED, PASSED, QUEUED, UNTOLD, WAITING
from dflockd.table.superseding import Superseding
from dflockd.wire import (
    InGroup,
    Owner,
    OwnerConflict,
    Refusal,
    Reply,
    Status,
    YourTurn,
    key_problem,
)

Answer: TypeAlias = Hold | Reply
"""What to answer: that it is granted, or that it was renewed, if it is a hold."""

_OK: Final = Status.OK
_ERROR: Final = Status.ERROR


class Locking(Superseding):
    """What those ask who want a slot or have one. Effects are what others are told."""

    @staticmethod
    def introduce(peer: Peer, owner: Owner) -> Refusal:
        """Note who asks with all that follows, and what that is shown as if it is said."""
        if owner.label is not None:
            peer.label = owner.label
        peer.owner = owner if owner.id else None
        return _OK

    def acquire(
        self,
        peer: Peer,
        space: int,
        key: bytes,
        limit: int,
        timeout: int,
        lease: int | None,
        now: float,
        effects: list[Effect],
    ) -> Answer | None:
        """Take a slot, or let the peer wait for one: then there is no answer yet."""
        group = self._group if self._is_whole else self._serving(key, now)
        entry: Entry | None = None
        if isinstance(group, Group) and group.recovers_until is None:
            entry = group.spaces[space].get(key)
        if entry is None and key_problem(key):
            return _ERROR
        ticket, in_group = b"", None
        ahead = peer.ahead
        if ahead is not None:
            peer.ahead, ticket, in_group = None, ahead.ticket, ahead.group
        if lease is None:
            lease = self.limits.default_lease
        if lease > self.limits.max_lease:
            return _ERROR
        if entry is None or entry.limit != limit:
            found = self._entry(group, space, key, limit, now)
            if not isinstance(found, Entry):
                return found
            entry = found
        owner = peer.owner
        rate: Rate | None = None
        if ahead is not None or (owner is not None and owner.age):
            heeded = self._heed(entry, peer, ahead, now, effects)
            if not isinstance(heeded, Entry):
                return heeded
            entry, owner = heeded, peer.owner
            if ahead is not None and ahead.rate is not None:
                rate = entry.queue().rate
        most = self._max_holds
        if ahead is not None and (waiter := self._resumed(entry, ticket)) is not None:
            if len(peer.holds) >= most or (limit > most and self._is_used_up(entry, waiter)):
                return self._refuse(entry)
            has_slot = self._reservations.take_up(
                waiter, entry, peer, lease, owner, two_phase=False
            )
            waiter.is_rated = rate is not None
            self._go_on_waiting(waiter, has_slot, timeout, now, effects)
            return None
        if owner is not None and entry.owners is not None:
            there = self._there(entry, owner)
            if isinstance(there, Waiter):
                if len(peer.holds) >= most:
                    return self._refuse(entry)
                has_slot = self._take_over(there, peer, lease, effects, two_phase=False)
                there.is_rated = rate is not None
                self._go_on_waiting(there, has_slot, timeout, now, effects)
                return None
            if there is not None:
                return there
        if len(peer.holds) >= most or (limit > most and self._is_used_up(entry, None)):
            return self._refuse(entry)
        if in_group is None:
            has_room = self._has_room(entry, rate, now)
        else:
            has_room = self._has_room_for(entry, in_group, rate, now, effects)
        if has_room:
            hold = self._grant(entry, peer, lease, now, rate)
            if in_group is not None:
                entry.grouped().begin(hold.fence, in_group)
            if hold.owner is not None:
                owners.add(entry, hold)
            if self.changes is not None:
                self._note(hold)
            return hold
        if self._is_full(entry):
            self.counts.full += 1
            return Status.MAX_WAITERS
        if timeout == 0:
            self.counts.busy += 1
            if not (entry.holds or entry.waiters):  # it is new, and its rate lets nobody begin
                self._remove(entry)
            return Status.TIMEOUT
        is_rated = rate is not None
        waiter = self._join(
            entry, peer, lease, now, two_phase=False, is_rated=is_rated, group=in_group
        )
        self._block(waiter, timeout, now)
        return None

    def enqueue(
        self,
        peer: Peer,
        space: int,
        key: bytes,
        limit: int,
        lease: int | None,
        now: float,
        effects: list[Effect],
    ) -> Answer:
        """Take a slot or a position in the queue."""
        group = self._group if self._is_whole else self._serving(key, now)
        entry: Entry | None = None
        if isinstance(group, Group) and group.recovers_until is None:
            entry = group.spaces[space].get(key)
        if entry is None and key_problem(key):
            return _ERROR
        ahead, peer.ahead = peer.ahead, None
        turn, peer.turn = peer.turn, None
        lease = self._lease(lease)
        if lease is None:
            return _ERROR
        name = (space, key)
        if name in peer.enqueued:
            return Status.ALREADY_ENQUEUED
        if entry is None or entry.limit != limit:
            found = self._entry(group, space, key, limit, now)
            if not isinstance(found, Entry):
                return found
            entry = found
        owner = peer.owner
        rate: Rate | None = None
        if ahead is not None or (owner is not None and owner.age):
            heeded = self._heed(entry, peer, ahead, now, effects)
            if not isinstance(heeded, Entry):
                return heeded
            entry, owner = heeded, peer.owner
            if ahead is not None and ahead.rate is not None:
                rate = entry.queue().rate
        waiter = None if ahead is None else self._resumed(entry, ahead.ticket)
        lost: Waiter | None = None
        if owner is not None and entry.owners is not None and waiter is None:
            there = self._there(entry, owner)
            if isinstance(there, OwnerConflict):
                return there
            lost = there
        if max(len(peer.holds), len(peer.enqueued)) >= self._max_holds or (
            lost is None and limit > self._max_holds and self._is_used_up(entry, waiter)
        ):
            return self._refuse(entry)
        if lost is not None:
            has_slot = self._take_over(lost, peer, lease, effects, two_phase=True)
            waiter = lost
        elif waiter is not None:
            has_slot = self._reservations.take_up(waiter, entry, peer, lease, owner, two_phase=True)
        else:
            in_group = None if ahead is None else ahead.group
            return self._enqueue_anew(entry, peer, lease, turn, rate, in_group, now, effects)
        peer.enqueued[name] = waiter
        waiter.turn = turn
        waiter.is_rated = rate is not None
        self._go_on_with(waiter, has_slot, now, effects)
        return self._answer_enqueued(waiter)

    def wait(
        self,
        peer: Peer,
        space: int,
        key: bytes,
        timeout: int,
        now: float,
        effects: list[Effect],
    ) -> Answer | None:
        """Have the slot that the peer has enqueued for, or wait for it: then there is no answer yet."""
        waiter = peer.enqueued.get((space, key))
        if waiter is None and key_problem(key):
            return _ERROR
        reserve, peer.reserve = peer.reserve, None
        if waiter is None:
            return self._outdated(peer, space, key) or Status.NOT_ENQUEUED
        hold = waiter.hold
        if hold is not None:
            self._forget_waiter(waiter)
            waiter.state = GONE
            hold.waiter = None
            hold.told = True
            hold.lease = waiter.lease
            self._extend(hold, waiter.lease, now)
            return hold
        if waiter.state == PASSED:
            self._reservations.come_back(waiter, waiter.entry)
            self._promote(waiter.entry, now, effects)
        if waiter.state == EXPECTED:
            return YourTurn(waiter.ticket)
        waiter.reserve = reserve
        if timeout == 0:
            return self._end_wait(waiter, now)
        self._block(waiter, timeout, now)
        return None

    def release(
        self, space: int, key: bytes, token: bytes, now: float, effects: list[Effect]
    ) -> Refusal:
        """Give a slot back."""
        group = self._group if self._is_whole else self._group_of(key)
        hold = self._find(group, space, key, token) if isinstance(group, Group) else None
        if hold is not None:
            self.counts.released += 1
            self._free(hold, now, effects)
            return _OK
        if key_problem(key):
            return _ERROR
        if not isinstance(group, Group):
            return group
        return self._release_forgotten(group, space, key, token, now, effects)

    def unbegun(
        self, space: int, key: bytes, token: bytes, now: float, effects: list[Effect]
    ) -> Refusal:
        """Give a slot back whose run has not begun: it does not count for the rate of the key."""
        group = self._group_of(key)
        hold = self._find(group, space, key, token) if isinstance(group, Group) else None
        if hold is not None:
            self._give_place_back(hold)
        return self.release(space, key, token, now, effects)

    def begun(
        self, peer: Peer, space: int, key: bytes, token: bytes, lease: int | None, now: float
    ) -> Answer:
        """Start a lease anew, and note that the run begins: it counts for one window from now."""
        answer = self.renew(peer, space, key, token, lease, now)
        if isinstance(answer, Hold) and (queue := answer.entry.waiters) is not None:
            rate = queue.rate
            if rate is not None and self.rates.begin(rate, answer.fence, now) and queue:
                self._wake(queue, rate, now)
        return answer

    def renew(
        self,
        peer: Peer,
        space: int,
        key: bytes,
        token: bytes,
        lease: int | None,
        now: float,
        *,
        confirm: bool = False,
    ) -> Answer:
        """Let a lease begin anew; what was forgotten comes back, unless it is to `confirm`."""
        lease = self._lease(lease)
        if lease is None:
            return _ERROR
        group = self._group if self._is_whole else self._serving(key, now)
        hold = self._find(group, space, key, token) if isinstance(group, Group) else None
        if hold is None and key_problem(key):
            return _ERROR
        if not isinstance(group, Group):
            return group
        if hold is None:
            back = None
            if not confirm:
                back = self._reclaim(group, peer, space, key, token, lease, now)
            if back is None:
                self.counts.unknown += 1
            return back or _ERROR
        if group.recovers_until is not None:
            doubt = self._doubt(group, hold, now, confirm=confirm)
            if doubt is not None:
                return doubt
        self.counts.renewed.add(1 - (hold.deadline - now) / hold.span)
        hold.lease = lease
        self._extend(hold, lease, now)
        if hold.peer is not peer:
            if hold.peer is not None:
                del hold.peer.holds[hold]
            hold.peer = peer
            hold.detached = False
            hold.label = peer.label or hold.label
            peer.holds[hold] = None
        return hold

    # What they come to.

    @staticmethod
    def _has_room(entry: Entry, rate: Rate | None, now: float) -> bool:
        """Whether a newcomer can have a slot, and the rate lets it begin.

        A waiter beside a free slot is one for which it is held, or one that gets it as soon as
        grants are given again.
        """
        free = entry.limit - len(entry.holds)
        queue = entry.waiters
        if free <= 0 or queue is None:
            return free > 0
        if rate is not None:
            free = min(free, rate.free(now))
            if queue.ahead > len(queue.told) + len(queue.expected):
                return False  # the rate lets one begin, and they are next
        return queue.ahead < free

    def _heed(
        self, entry: Entry, peer: Peer, ahead: Ahead | None, now: float, effects: list[Effect]
    ) -> Entry | Refusal:
        """Take in how old it is who asks for a slot, and at what rate such runs may begin.

        Returns:
            The entry, which may be new, or what to answer.
        """
        owner = peer.owner
        if owner is not None and owner.age:
            ticket = b"" if ahead is None else ahead.ticket
            answer = self._asked_with_age(entry, peer, owner, ticket, now, effects)
            if not isinstance(answer, Entry):
                return answer
            entry = answer
        if ahead is not None and ahead.rate is not None:
            refusal = self._name_rate(entry, ahead.rate, now)
            if refusal is not None:
                return refusal
        return entry

    def _name_rate(self, entry: Entry, asked: wire.Rate, now: float) -> Status | None:
        """Let the rate of an entry, which may be new, be what was asked; or say why not."""
        refusal = self.rates.refusal(entry.group, (entry.space, entry.key), asked)
        if refusal is None:
            rate = self.rates.name(entry.group, (entry.space, entry.key), asked, now)
            entry.queue().rate = rate
        elif not (entry.holds or entry.waiters):
            self._remove(entry)
        return refusal

    def _has_room_for(
        self,
        entry: Entry,
        in_group: InGroup,
        rate: Rate | None,
        now: float,
        effects: list[Effect],
    ) -> bool:
        """Whether somebody of a group who has just come can have a slot."""
        queue = entry.waiters
        if queue is None:
            return self._has_room(entry, rate, now)
        if queue.heed(in_group):  # it had all that it might: so the entry stays
            self._promote(entry, now, effects)
        return queue.has_room(in_group) and self._has_room(entry, rate, now)

    def _is_used_up(self, entry: Entry, resumed: Waiter | None) -> bool:
        """Whether an entry has all the holders that it may have; a waiter with a turn is one."""
        told = len(entry.waiters.told) if entry.waiters is not None and resumed is None else 0
        return len(entry.holds) + told >= self._max_holds

    def _refuse(self, entry: Entry) -> Reply:
        """Return the answer to who asks for too much, of an entry that may be new."""
        self.counts.full += 1
        if not (entry.holds or entry.waiters):
            self._remove(entry)
        return Status.MAX_HOLDS

    def _resumed(self, entry: Entry, ticket: bytes) -> Waiter | None:
        return self._reservations.find(entry.group, entry.space, entry.key, ticket)

    def _asked_with_age(
        self,
        entry: Entry,
        peer: Peer,
        owner: Owner,
        ticket: bytes,
        now: float,
        effects: list[Effect],
    ) -> Entry | Refusal:
        """Have somebody with an age ask for a lock; see `_contend`.

        That the same attempt of it is there already is said first: that one has an end of its own.
        An age that was not given out here counts as `OLDEST`. It may be another server's, from before
        the list of servers changed, or nobody's; if it counted as it is, it could be the newest for
        good. It wins over nobody that way, and nobody is kept from the lock by it.
        """
        if owner.age > entry.group.issuer.fence:
            owner = peer.owner = owner._replace(age=OLDEST)
        resumed = self._resumed(entry, ticket) if ticket else None
        if resumed is None and entry.owners is not None:
            there = self._there(entry, owner)
            if isinstance(there, OwnerConflict):
                return there
        return self._contend(entry, peer, owner.age, resumed, now, effects)

    def _go_on_waiting(
        self, waiter: Waiter, has_slot: bool, timeout: int, now: float, effects: list[Effect]
    ) -> None:
        """Let somebody who is back in a queue wait there: the answer is one of the effects."""
        self._block(waiter, timeout, now)
        self._go_on_with(waiter, has_slot, now, effects)

    def _enqueue_anew(
        self,
        entry: Entry,
        peer: Peer,
        lease: int,
        turn: float | None,
        rate: Rate | None,
        in_group: InGroup | None,
        now: float,
        effects: list[Effect],
    ) -> Answer:
        """Enqueue a request that has no position yet, and wants a turn or a grant."""
        if in_group is None:
            has_room = self._has_room(entry, rate, now)
        else:
            has_room = self._has_room_for(entry, in_group, rate, now, effects)
        if turn is None and has_room:
            waiter = self._grant_enqueued(entry, peer, lease, rate, now)
            if waiter.hold is not None and in_group is not None:
                entry.grouped().begin(waiter.hold.fence, in_group)
        elif self._is_full(entry):
            self.counts.full += 1
            return Status.MAX_WAITERS
        else:
            is_rated = rate is not None
            waiter = self._join(
                entry, peer, lease, now, two_phase=True, is_rated=is_rated, group=in_group
            )
        peer.enqueued[entry.space, entry.key] = waiter
        if turn is not None:
            waiter.turn = turn
            self._promote(entry, now, effects)
        return self._answer_enqueued(waiter)

    def _answer_enqueued(self, waiter: Waiter) -> Answer:
        hold = waiter.hold
        if hold is None:
            return YourTurn(waiter.ticket) if waiter.state == EXPECTED else Status.QUEUED
        if waiter.state == UNTOLD:
            waiter.state = GRANTED
            hold.told = True
        self._note(hold)
        return hold

    def _grant_enqueued(
        self, entry: Entry, peer: Peer, lease: int, rate: Rate | None, now: float
    ) -> Waiter:
        """Grant at once what somebody enqueues for, and return who has yet to say ``wait``."""
        hold = self._grant(entry, peer, lease, now, rate)
        if hold.owner is not None:
            owners.add(entry, hold)
        number = next(self._arrivals)
        waiter = Waiter(entry, peer, number, lease, now, two_phase=True, state=GRANTED)
        hold.waiter, waiter.hold = waiter, hold
        return waiter

    @staticmethod
    def _there(entry: Entry, owner: Owner) -> OwnerConflict | Waiter | None:
        """Return the answer to an owner whose attempt is at a key already, or a later one is.

        Or the waiter of the same process: then its former connection is lost.
        """
        there = owners.latest(entry, owner.id)
        if there is None or there.owner is None or owner.attempt > there.owner.attempt:
            return None
        if isinstance(there, Hold):
            return OwnerConflict(b"held", there.owner.attempt)
        is_same = there.owner[1:3] == owner[1:3]  # attempt and instance; labels may differ
        if owner.instance and is_same and not there.is_away:
            return there
        return OwnerConflict(b"waiting", there.owner.attempt)

    def _take_over(
        self, waiter: Waiter, peer: Peer, lease: int, effects: list[Effect], *, two_phase: bool
    ) -> bool:
        """Let a peer wait where another connection of the same process does so far.

        Returns:
            Whether there is a slot for it alone.
        """
        has_slot = False
        if waiter.state == WAITING and waiter.owner is not None:
            self.deadlines.clear(waiter)
            waiter.peer.waiting = None
            waiter.state = QUEUED
            effects.append((waiter.peer.id, OwnerConflict(b"waiting", waiter.owner.attempt)))
        elif waiter.is_told:
            has_slot = self._reservations.come_back(waiter, waiter.entry)
        if waiter.two_phase:
            self._forget_waiter(waiter)
        waiter.peer, waiter.lease, waiter.two_phase = peer, lease, two_phase
        waiter.reserve = waiter.turn = None
        return has_slot
