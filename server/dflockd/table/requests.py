"""The requests for a slot: to take one, to wait for it, to keep it and to release it.

Each is a method with plain arguments that returns what to answer; a `Hold` stands for its grant.
`dflockd.table.LockTable` takes messages instead.

Keys come as they were sent. One that is here was looked at when it came; any other is looked at before
anything else is done about it.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from dflockd.table import owners, recovery, superseding
from dflockd.table.newest import OLDEST
from dflockd.table.rates import KeyRate
from dflockd.table.slots import Effect, Slots
from dflockd.table.state import Entry, Hold, Partition, Peer, Waiter
from dflockd.table.states import GONE, GRANTED, UNTOLD
from dflockd.wire import (
    FairGroup,
    Owner,
    OwnerConflict,
    Queued,
    Refusal,
    Reply,
    Space,
    Status,
    key_problem,
)
from dflockd.wire.arguments import Asked

Answer: TypeAlias = Hold | Reply
"""What to answer: that it is granted, or that it was renewed, if it is a hold."""

_OK: Final = Status.OK
_ERROR: Final = Status.ERROR


class Requests:
    """What those ask who want a slot or have one. Effects are what others are told.

    Attributes:
        slots: the slots of all keys.
        limits: how much the table allows, as `Slots.limits`.
        counts: what has happened in the table, as `Slots.counts`.
        changes: the holds that have changed, as `Slots.changes`.
        rates: the rates of all keys, as `Slots.rates`.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.limits = slots.limits
        self.counts = slots.counts
        self.changes = slots.changes
        self.rates = slots.rates
        self._partition = Partition(slots.issuer)
        self._is_whole = True
        """Whether all keys are in that partition, whatever the time."""
        self._earlier = -1
        """The last fence of earlier tables, whose leases may have been longer than any of this one."""

    def locate(self, key: bytes) -> Partition | Refusal:
        """Return the partition that a key is in, or what to answer if that is not here."""
        return self._partition

    def serving(self, key: bytes, now: float) -> Partition | Refusal:
        """Return the partition that a key is in, if it may be granted and renewed there now."""
        return self.locate(key)

    def acquire(
        self, peer: Peer, space: int, key: bytes, asked: Asked, now: float, effects: list[Effect]
    ) -> Answer | None:
        """Take a slot, or let the peer wait for one: then there is no answer yet."""
        lease = self.limits.default_lease if asked.lease is None else asked.lease
        # No lease may be longer than a recovery waits: one that outlasts it would have a second holder
        # beside it. Here and below, what asks for little is told at once: each call is a fortieth of
        # it all.
        if lease > self.limits.max_lease or (asked.limit != 1 and self._is_beyond(asked)):
            return _ERROR
        entry = self._admit(peer, space, key, asked, now, effects)
        if not isinstance(entry, Entry):
            return entry
        # Before any look at free slots: of a semaphore there may be some, and a message that is
        # delivered twice must not run twice because of that.
        if asked.ticket or asked.owner is not None:
            waiter = self._position_of(entry, peer, asked)
            if isinstance(waiter, OwnerConflict):
                return waiter
            if waiter is not None:
                return self._go_on_waiting(waiter, entry, peer, asked, lease, now, effects)
        number, most = len(peer.holds), self.slots.max_holds
        if not number < most >= asked.limit and self._is_too_much(entry, asked, None, number):
            return self._refuse(entry)
        rate = None if asked.rate is None else entry.queue().rate
        if asked.group is not None:
            if self._has_room_for(asked.group, entry, rate, now, effects):
                hold = self.slots.grant_share(
                    *(entry, peer, lease, asked.owner, asked.label, now, rate, asked.group)
                )
                self.slots.note(hold)
                self._look_behind(entry, now, effects)
                return hold
        elif (
            len(entry.holds) < entry.limit
            if entry.waiters is None
            else self._has_room(entry, rate, now)
        ):
            hold = self.slots.grant(entry, peer, lease, asked.owner, asked.label, now, rate)
            if self.changes is not None:
                self.slots.note(hold)
            return hold
        if self.slots.is_full(entry):
            self.counts.full += 1
            return Status.MAX_WAITERS
        if not asked.timeout and asked.reserve is None:
            self.counts.busy += 1
            if not entry.holds:
                self.slots.remove_unused(entry)  # it is new, and its rate lets nobody begin
            return Status.TIMEOUT
        waiter = self.slots.join(
            *(entry, peer, lease, now, asked.owner, asked.label, asked.group),
            two_phase=False,
            is_rated=rate is not None,
        )
        waiter.reserve = asked.reserve
        if not asked.timeout:
            return self.slots.end_wait(waiter, now, effects)
        self.slots.block(waiter, asked.timeout, now)
        if entry.queue().is_grouped:
            self._look_behind(entry, now, effects)
        return None

    def enqueue(
        self, peer: Peer, space: int, key: bytes, asked: Asked, now: float, effects: list[Effect]
    ) -> Answer:
        """Take a slot or a position in the queue."""
        lease = self.limits.default_lease if asked.lease is None else asked.lease
        if lease > self.limits.max_lease or self._is_beyond(asked):
            return _ERROR
        if asked.turn is not None and peer.process is None:
            return _ERROR  # nobody could be told
        name = (space, key)
        if name in peer.enqueued:
            return Status.ALREADY_ENQUEUED
        entry = self._admit(peer, space, key, asked, now, effects)
        if not isinstance(entry, Entry):
            return entry
        waiter: Waiter | None = None
        if asked.ticket or asked.owner is not None:
            found = self._position_of(entry, peer, asked)
            if isinstance(found, OwnerConflict):
                return found
            waiter = found
        if self._is_too_much(entry, asked, waiter, max(len(peer.holds), len(peer.enqueued))):
            return self._refuse(entry)
        if waiter is None:
            return self._enqueue_anew(entry, peer, asked, lease, now, effects)
        has_slot = self._move(waiter, entry, peer, asked, lease, effects, two_phase=True)
        peer.enqueued[name] = waiter
        self.slots.go_on_with(waiter, has_slot, now, effects)
        return self._answer_enqueued(waiter)

    def wait(
        self, peer: Peer, space: int, key: bytes, asked: Asked, now: float, effects: list[Effect]
    ) -> Answer | None:
        """Have the slot that the peer has enqueued for, or wait for it: then there is no answer yet."""
        waiter = peer.enqueued.get((space, key))
        if waiter is None:
            if key_problem(key):
                return _ERROR
            partition = self.locate(key)
            older: Refusal | None = None
            if space == Space.LOCK and isinstance(partition, Partition):
                older = partition.newer_than(key, asked.age)
            return older or Status.NOT_ENQUEUED
        hold = waiter.hold
        if hold is not None:
            self.slots.forget_waiter(waiter)
            waiter.state = GONE
            hold.waiter = None
            hold.told = True
            hold.lease = waiter.lease
            # Anew, for the client learns of it only now, and counts from before it has sent `wait`.
            self.slots.extend(hold, waiter.lease, now)
            return hold
        waiter.reserve = asked.reserve
        if asked.timeout == 0 and not waiter.is_told:
            return self.slots.end_wait(waiter, now, effects)
        self.slots.block(waiter, asked.timeout, now)
        return None

    def release(
        self, space: int, key: bytes, token: bytes, now: float, effects: list[Effect]
    ) -> Refusal:
        """Give a slot back."""
        partition = self._partition if self._is_whole else self.locate(key)
        hold = (
            self.slots.find(partition, space, key, token)
            if isinstance(partition, Partition)
            else None
        )
        if hold is not None:
            self.counts.released += 1
            self.slots.free(hold, now, effects)
            return _OK
        if key_problem(key):
            return _ERROR
        if not isinstance(partition, Partition):
            return partition
        return recovery.release_forgotten(self.slots, partition, space, key, token, now, effects)

    def unbegun(self, key: bytes, token: bytes, now: float, effects: list[Effect]) -> Refusal:
        """Give a slot back whose run has not begun: it does not count for the rate of the key."""
        partition = self.locate(key)
        hold: Hold | None = None
        if isinstance(partition, Partition):
            hold = self.slots.find(partition, Space.LOCK, key, token)
        if hold is not None:
            self.slots.give_place_back(hold)
        return self.release(Space.LOCK, key, token, now, effects)

    def begun(self, hold: Hold, now: float) -> None:
        """Note that a run begins: it counts for one window from now."""
        queue = hold.entry.waiters
        if queue is not None:
            rate = queue.rate
            if rate is not None and self.rates.begin(rate, hold.fence, now) and queue:
                self.slots.wake(queue, rate, now)

    def renew(
        self,
        peer: Peer,
        space: int,
        key: bytes,
        token: bytes,
        lease: int | None,
        now: float,
        effects: list[Effect],
        owner: Owner | None = None,
        label: bytes = b"",
        group: FairGroup | None = None,
        *,
        confirm: bool = False,
    ) -> Answer:
        """Let a lease begin anew; what was forgotten comes back, unless it is to `confirm`.

        Args:
            peer: whose the hold is from now on.
            space: the kind of lock.
            key: the name of the lock.
            token: the token of the hold.
            lease: seconds; ``None`` for the default.
            now: the time.
            effects: what others are told.
            owner: the run that has the hold, should it come back.
            label: the label of that run.
            group: the group and the weight of that run.
            confirm: whether a hold that was forgotten stays forgotten.
        """
        lease = self.limits.default_lease if lease is None else lease
        if lease > self.limits.max_lease:
            if not self._is_earlier(space, key, token):
                return _ERROR
            lease = self.limits.max_lease
        serving = self._partition if self._is_whole else self.serving(key, now)
        hold = (
            self.slots.find(serving, space, key, token) if isinstance(serving, Partition) else None
        )
        if hold is None and key_problem(key):
            return _ERROR
        if not isinstance(serving, Partition):
            return serving
        if hold is None:
            back = None
            if not confirm:
                who = owner, label, group
                back = recovery.reclaim(
                    *(self.slots, serving, peer, space, key, token, lease, now, effects), *who
                )
            if back is None:
                self.counts.unknown += 1
            return back or (Status.LEASE_EXPIRED if confirm else _ERROR)
        if serving.recovers_until is not None:
            doubt = recovery.doubt(serving, hold, now, confirm=confirm)
            if doubt is not None:
                return doubt
        self.counts.renewed.add(1 - (hold.deadline - now) / hold.span)
        hold.lease = lease
        self.slots.extend(hold, lease, now)
        if hold.peer is not peer:
            # It is of the connection that has renewed it. The end of the former one must not release
            # it any more: that may be noticed long after its client has come back on another.
            if hold.peer is not None:
                del hold.peer.holds[hold]
            self.slots.forget_enqueue(hold)
            hold.peer = peer
            hold.detached = False
            hold.label = label or hold.label
            peer.holds[hold] = None
        return hold

    # What they come to.

    def _is_earlier(self, space: int, key: bytes, token: bytes) -> bool:
        """Whether an earlier table has granted a hold: its holder asks for what it was given there."""
        verified = self.slots.issuer.verify(space, key, token)
        return verified is not None and verified[0] <= self._earlier

    def _admit(
        self, peer: Peer, space: int, key: bytes, asked: Asked, now: float, effects: list[Effect]
    ) -> Entry | Refusal:
        """Let somebody ask for a slot of a key, and take in what they say of it.

        That is its limit and its rate, and how old a run there is that wants it.

        Returns:
            The entry, which may be new, or what to answer.
        """
        partition = self._partition if self._is_whole else self.serving(key, now)
        if not isinstance(partition, Partition):
            return _ERROR if key_problem(key) else partition
        if partition.recovers_until is not None:
            wait = recovery.wait(partition, now)
            if wait is not None:
                return _ERROR if key_problem(key) else wait
        entry = partition.spaces[space].get(key)
        if entry is None:
            if key_problem(key):
                return _ERROR
            found = self.slots.enter(partition, space, key, asked.limit, now)
            if not isinstance(found, Entry):
                return found
            entry = found
        elif entry.limit != asked.limit:
            return self._take_in(entry, peer, asked, now, effects)
        if asked.rate is not None or (asked.owner is not None and asked.owner.age):
            return self._take_in(entry, peer, asked, now, effects)
        return entry

    def _take_in(
        self, entry: Entry, peer: Peer, asked: Asked, now: float, effects: list[Effect]
    ) -> Entry | Refusal:
        """Take in what somebody says of a key, whose entry may be new; see `_admit`."""
        rate = asked.rate
        if rate is not None:
            # First: a rate that may not be changes nothing of the key, and sends no older run away.
            book, name = entry.partition.rates, (entry.space, entry.key)
            refusal: Refusal | None = self.rates.refusal(book, name, rate)
            if refusal is not None:
                self.slots.remove_unused(entry)
                return refusal
        if entry.limit != asked.limit:
            refusal = self.slots.change_limit(entry, asked.limit, now, effects)
            if refusal is not None:
                return refusal
        if asked.owner is not None and asked.owner.age:
            refusal = self._contend_with_age(entry, peer, asked, now, effects)
            if refusal is not None:
                return refusal
        if rate is not None:
            entry.queue().rate = self.rates.name(book, name, rate, now)
        return entry

    def _is_beyond(self, asked: Asked) -> bool:
        """Whether somebody asks for what cannot be: that changes nothing, not even the limit.

        To have a slot set aside for longer than any lease may last, or to be the newest of several.
        """
        if asked.limit != 1 and asked.owner is not None and asked.owner.age:
            return True
        return asked.turn is not None and asked.turn > self.limits.max_lease * 1000

    def _position_of(self, entry: Entry, peer: Peer, asked: Asked) -> Waiter | OwnerConflict | None:
        """Return the position that somebody takes up, by its ticket or as what their process lost."""
        if asked.ticket:
            waiter = self.slots.reservations.find(
                entry.partition, entry.space, entry.key, asked.ticket
            )
            if waiter is not None:
                return waiter
        if asked.owner is None or entry.owners is None:
            return None
        return self._there(entry, peer, asked.owner)

    def _move(
        self,
        waiter: Waiter,
        entry: Entry,
        peer: Peer,
        asked: Asked,
        lease: int,
        effects: list[Effect],
        *,
        two_phase: bool,
    ) -> bool:
        """Let a peer wait at a position from `_position_of`.

        Returns:
            Whether there is a slot for it alone.
        """
        is_resumed = _is_resumed(waiter, asked)
        if is_resumed or waiter.owner is None:
            self.slots.unblock(waiter, Status.NOT_ENQUEUED, effects)
        else:
            conflict = OwnerConflict(b"waiting", waiter.owner.attempt)
            self.slots.unblock(waiter, conflict, effects)
        if waiter.two_phase:
            self.slots.forget_waiter(waiter)
        if waiter.turn is not None:
            del entry.partition.reserved[waiter.ticket]
        has_slot = self.slots.reservations.come_back(waiter, entry)
        if is_resumed:
            owners.discard(entry, waiter)
            waiter.owner, waiter.label = asked.owner, asked.label
            owners.add(entry, waiter)
        waiter.lease, waiter.two_phase, waiter.reserve = lease, two_phase, asked.reserve
        if is_resumed and asked.turn is not None:
            waiter.ticket = b""  # a ticket works once
        turn = None if asked.turn is None else asked.turn / 1000
        self.slots.hand(waiter, peer, turn, is_rated=asked.rate is not None)
        return has_slot

    def _has_room(
        self, entry: Entry, rate: KeyRate | None, now: float, slots: int = 1, places: int = 1
    ) -> bool:
        """Whether a newcomer can have so many slots, and places of the rate.

        A waiter beside a free slot is one for which it is held, or one that gets it as soon as
        grants are given again; or it waits for more of them.
        """
        queue = entry.waiters
        if queue is None:
            return len(entry.holds) <= entry.limit - slots
        free = entry.limit - len(entry.holds)
        if queue.pause is not None or (queue.is_heavy and self.slots.first(queue, free, now)):
            return False  # nobody passes who waits for more slots than are free
        if rate is not None and (queue.rated_ahead or rate.free(now) - queue.places < places):
            return False  # none for anybody, or it is that of somebody else
        ahead = queue.ahead + queue.rated_ahead if queue.pending else queue.ahead
        return ahead <= free - slots

    def _has_room_for(
        self,
        share: FairGroup,
        entry: Entry,
        rate: KeyRate | None,
        now: float,
        effects: list[Effect],
    ) -> bool:
        """Whether a newcomer with a group or a weight can have its slots, and all let it begin."""
        queue = entry.waiters
        if queue is not None:
            if queue.heed(share):
                self.slots.promote(entry, now, effects)
                self.slots.put_back(entry)
            if not queue.has_room(share):
                return False
        places = 1 if rate is None else min(share.weight, rate.runs)
        return self._has_room(entry, rate, now, min(share.weight, entry.limit), places)

    def _look_behind(self, entry: Entry, now: float, effects: list[Effect]) -> None:
        """Serve who is next after a newcomer has come, where somebody takes more than one slot.

        Its group may be left out now. Then those go on who have waited for the first one of that. Or
        its group has its turn before the one that waits for several.
        """
        if entry.waiters is not None and entry.waiters.is_heavy:
            self.slots.promote(entry, now, effects)

    def _is_too_much(self, entry: Entry, asked: Asked, back: Waiter | None, number: int) -> bool:
        """Whether a connection has as much as it may, or a key has all holders that it ever may.

        Args:
            entry: the entry of the key.
            asked: for a slot of it.
            back: the position that is taken up, if one is. What its own process has lost is waited
                for already, and one with a turn is not counted beside its own hold.
            number: how much the connection has.
        """
        if number >= self.slots.max_holds:
            return True
        if asked.limit <= self.slots.max_holds or (
            back is not None and not _is_resumed(back, asked)
        ):
            return False
        told = len(entry.waiters.told) if entry.waiters is not None and back is None else 0
        return len(entry.holds) + told >= self.slots.max_holds

    def _refuse(self, entry: Entry) -> Reply:
        """Return the answer to who asks for too much, of an entry that may be new."""
        self.counts.full += 1
        self.slots.remove_unused(entry)
        return Status.MAX_HOLDS

    def _contend_with_age(
        self, entry: Entry, peer: Peer, asked: Asked, now: float, effects: list[Effect]
    ) -> Refusal | None:
        """Have somebody with an age ask for a lock; see `superseding`.

        That the same attempt of it is there already is said first: that one has an end of its own.
        An age that was not given out here counts as `OLDEST`. It may be another server's, from before
        the list of servers changed, or nobody's; if it counted as it is, it could be the newest for
        good. It wins over nobody that way, and nobody is kept from the lock by it.
        """
        owner = asked.owner
        assert owner is not None
        if owner.age > entry.partition.issuer.fence:
            owner = asked.owner = owner._replace(age=OLDEST)
        found = self._position_of(entry, peer, asked)
        if isinstance(found, OwnerConflict):
            return found
        resumed = found if found is not None and _is_resumed(found, asked) else None
        return superseding.contend(self.slots, entry, owner.age, asked.label, resumed, now, effects)

    def _go_on_waiting(
        self,
        waiter: Waiter,
        entry: Entry,
        peer: Peer,
        asked: Asked,
        lease: int,
        now: float,
        effects: list[Effect],
    ) -> Answer | None:
        """Let somebody who is back in a queue wait there: a grant is one of the effects."""
        if self._is_too_much(entry, asked, waiter, len(peer.holds)):
            return self._refuse(entry)
        has_slot = self._move(waiter, entry, peer, asked, lease, effects, two_phase=False)
        self.slots.block(waiter, asked.timeout, now)
        self.slots.go_on_with(waiter, has_slot, now, effects)
        return None

    def _enqueue_anew(
        self,
        entry: Entry,
        peer: Peer,
        asked: Asked,
        lease: int,
        now: float,
        effects: list[Effect],
    ) -> Answer:
        """Enqueue a request that has no position yet, and wants a turn or a grant."""
        rate = None if asked.rate is None else entry.queue().rate
        has_room = (
            self._has_room(entry, rate, now)
            if asked.group is None
            else self._has_room_for(asked.group, entry, rate, now, effects)
        )
        if asked.turn is None and has_room:
            waiter = self._grant_enqueued(entry, peer, asked, lease, rate, now)
        elif self.slots.is_full(entry):
            self.counts.full += 1
            return Status.MAX_WAITERS
        else:
            waiter = self.slots.join(
                *(entry, peer, lease, now, asked.owner, asked.label, asked.group),
                two_phase=True,
                is_rated=rate is not None,
                turn=None if asked.turn is None else asked.turn / 1000,
            )
        peer.enqueued[entry.space, entry.key] = waiter
        if asked.turn is not None:
            self.slots.promote(entry, now, effects)
        elif asked.group is not None or (waiter.hold is None and entry.queue().is_grouped):
            self._look_behind(entry, now, effects)
        return self._answer_enqueued(waiter)

    def _answer_enqueued(self, waiter: Waiter) -> Answer:
        hold = waiter.hold
        if hold is None:
            return Status.QUEUED if waiter.turn is None else Queued(waiter.ticket)
        if waiter.state == UNTOLD:
            waiter.state = GRANTED
            hold.told = True
        self.slots.note(hold)
        return hold

    def _grant_enqueued(
        self, entry: Entry, peer: Peer, asked: Asked, lease: int, rate: KeyRate | None, now: float
    ) -> Waiter:
        """Grant at once what somebody enqueues for, and return who has yet to say ``wait``."""
        hold = self.slots.grant_share(
            *(entry, peer, lease, asked.owner, asked.label, now, rate, asked.group)
        )
        number = next(self.slots.arrivals)
        waiter = Waiter(entry, peer, number, lease, now, two_phase=True, state=GRANTED)
        hold.waiter, waiter.hold = waiter, hold
        return waiter

    @staticmethod
    def _there(entry: Entry, peer: Peer, owner: Owner) -> OwnerConflict | Waiter | None:
        """Return the answer to an owner whose attempt is at a key already, or a later one is.

        Or the waiter of the same process: then its former connection is lost.
        """
        there = owners.latest(entry, owner.id)
        if there is None or there.owner is None or owner.attempt > there.owner.attempt:
            return None
        if isinstance(there, Hold):
            return OwnerConflict(b"held", there.owner.attempt)
        is_same = there.owner.attempt == owner.attempt and there.peer.instance == peer.instance
        if peer.instance and is_same and not there.is_away:
            return there
        return OwnerConflict(b"waiting", there.owner.attempt)


def _is_resumed(waiter: Waiter, asked: Asked) -> bool:
    """Whether a position is taken up by its ticket."""
    ticket = asked.ticket
    return ticket != b"" and waiter.entry.partition.reserved.get(ticket) is waiter
