"""Slots and waiters: the effect of every request, deadline and lost connection."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hmac import compare_digest
from typing import TypeAlias, TypeVar

from dflockd.table import owners
from dflockd.table.counts import Counts
from dflockd.table.deadlines import Deadlines
from dflockd.table.issuer import TokenIssuer
from dflockd.table.limits import STEP, Limits
from dflockd.table.line import ClientProcess, ReservedPosition
from dflockd.table.newest import NewestKeys
from dflockd.table.pauses import NEVER, KeyPause, PauseRecord
from dflockd.table.queue import Queue
from dflockd.table.rates import KeyRate, PackedRates, Rates
from dflockd.table.reservations import RESERVED_LATE, Reservations
from dflockd.table.state import UNKNOWN, Change, Entry, Hold, Partition, Peer, Waiter
from dflockd.table.states import GONE, LISTENING, QUEUED, RESERVED, UNTOLD, WAITING
from dflockd.wire import (
    FairGroup,
    Granted,
    Owner,
    Refusal,
    Reply,
    Space,
    Status,
    Superseded,
    TimedOut,
    YourTurn,
)

Effect: TypeAlias = tuple[int, Reply]
"""What to do after a step: send this reply to the peer with that number."""

Job: TypeAlias = Callable[[float, list[Effect]], bool]
"""Does a part of something at that time, and says whether that was the last."""

T = TypeVar("T")


class Slots:
    """Entries with their holds and queues, and how slots change hands.

    It knows no request; `dflockd.table.LockTable` adds those.

    Attributes:
        limits: how much it allows.
        counts: what has happened here.
        changes: the holds that the steps since it was last emptied have begun, extended or ended,
            the newest of keys that have come and gone, runs that have begun, and pauses.
            Only where the table is `kept`: the journal empties the list, before the effects of a
            step are carried out.
        deadlines: what falls due by itself.
        rates: how many runs may begin in a while.
        backlog: what was more than fits a step, first come, first served: there are more to come.
        newest: the newest of keys.
        paused: how many keys are paused.
    """

    def __init__(
        self, limits: Limits, issuer: TokenIssuer, *, kept: bool = False, stretch: float = 1
    ) -> None:
        self.limits = limits
        self.stretch = stretch
        """How many times as long as they are said to be leases are here."""
        self.counts = Counts()
        self.changes: list[Change] | None = [] if kept else None
        self.issuer = issuer
        self.size = 0
        self.paused = 0
        self.arrivals = itertools.count()
        self.deadlines = Deadlines()
        self.max_holds = limits.max_holds or sys.maxsize
        self.reservations = Reservations(self.deadlines, self.counts, self.max_holds)
        note = None if self.changes is None else self.changes.append
        self.rates = Rates(self.deadlines, self.counts, limits, note)
        self.newest = NewestKeys()
        self.withheld: dict[Entry, None] = {}
        """Where grants are due that could not be given at the time."""
        self.backlog: deque[Job] = deque()
        self.behind = 0.0
        """Since when there is something in it."""

    # What is where.

    def enter(
        self, partition: Partition, space: int, key: bytes, limit: int, now: float
    ) -> Entry | Refusal:
        """Return a new entry for a key that is free, if there may be one more."""
        if self.size >= self.limits.max_locks:
            self.counts.full += 1
            return Status.MAX_LOCKS
        return self.add(partition, space, key, limit, now)

    def change_limit(
        self, entry: Entry, limit: int, now: float, effects: list[Effect]
    ) -> Refusal | None:
        """Let so many hold the key of an entry that somebody asks for; or return what to answer.

        How many may hold a lock is what the latest request says. A semaphore has its limit from who
        asked for it first.
        """
        if entry.space == Space.SEMAPHORE and entry.limit != UNKNOWN:
            return Status.LIMIT_MISMATCH
        if entry.limit != UNKNOWN:
            entry.queue().resized = now
        is_more, entry.limit = limit > entry.limit, limit
        if is_more and entry.waiters:
            self.promote(entry, now, effects)  # ahead of who asks
            self.put_back(entry)
        return None

    def add(self, partition: Partition, space: int, key: bytes, limit: int, now: float) -> Entry:
        """Return a new entry for a key that is free."""
        self.size += 1
        entry = partition.spaces[space][key] = Entry(partition, space, key, limit)
        rates = partition.rates
        if rates.open or rates.packed:
            rate = self.rates.find(rates, space, key, now)
            if rate is not None:
                self.rates.use(rate)
                entry.queue().rate = rate
        return entry

    def remove(self, entry: Entry) -> None:
        """Forget an entry where nobody is any more, unless it is paused."""
        if entry.waiters is not None:
            queue = entry.waiters
            if queue.pause is not None:
                return
            if queue.rate is not None:
                self.rates.rest(queue.rate)
        self.size -= 1
        if self.withheld:
            self.withheld.pop(entry, None)
        del entry.partition.spaces[entry.space][entry.key]

    def remove_unused(self, entry: Entry) -> None:
        """Forget an entry that has no holder and no waiter, if it is not gone already."""
        if not (entry.holds or entry.waiters) and self.is_here(entry):
            self.remove(entry)

    def put_back(self, entry: Entry) -> None:
        """Have an entry again if it was removed in this step: somebody asks for a slot of it."""
        if self.is_here(entry):
            return
        self.size += 1
        entry.partition.spaces[entry.space][entry.key] = entry
        if entry.rate is not None:
            self.rates.use(entry.rate)

    # Holds.

    def grant(
        self,
        entry: Entry,
        peer: Peer,
        lease: int,
        owner: Owner | None,
        label: bytes,
        now: float,
        rate: KeyRate | None = None,
    ) -> Hold:
        """Give a free slot of an entry to somebody."""
        issuer, limit = entry.partition.issuer, entry.limit
        # The fence is larger than any before: by that a resource refuses what a former holder still
        # writes.
        token = issuer.issue(entry.space, entry.key, is_sole=limit == 1)
        fence = issuer.fence
        hold = Hold(entry, fence, token, peer, lease, now, limit, owner, label)
        entry.holds[fence] = hold
        peer.holds[hold] = None
        # The client counts its lease from before it has sent the request, so there it ends first. The
        # other way round somebody else would get the slot while the client still trusts in it.
        self.deadlines.set(hold, lease * self.stretch, now)
        self.counts.granted += 1
        if rate is not None:
            rate.pending[fence] = 1  # as `KeyRate.take`, without a call
            rate.taken += 1
        if owner is not None:
            owners.add(entry, hold)
        return hold

    def grant_share(
        self,
        entry: Entry,
        peer: Peer,
        lease: int,
        owner: Owner | None,
        label: bytes,
        now: float,
        rate: KeyRate | None,
        share: FairGroup | None,
    ) -> Hold:
        """Give free slots of an entry to somebody who may belong to a group, or have a weight."""
        hold = self.grant(entry, peer, lease, owner, label, now, rate)
        if share is not None:
            entry.grouped().begin(hold.fence, share)
            if rate is not None:
                rate.take(hold.fence, min(share.weight, rate.runs))
        return hold

    def extend(self, hold: Hold, span: float, now: float) -> None:
        """Let a lease begin anew."""
        self.deadlines.reset(hold, span * self.stretch, now)
        self.note(hold)

    def give_place_back(self, hold: Hold) -> None:
        """Note that a run will not begin, if it has not."""
        rate = hold.entry.rate
        if rate is not None:
            self.rates.give_back(rate, hold.fence)

    def note(self, hold: Hold) -> None:
        """Have a change of a hold kept."""
        # One that its client was not told of is not kept: nobody works on the strength of it, and after
        # a restart it would keep others waiting for a whole lease.
        if self.changes is not None and hold.told:
            self.changes.append(hold)

    @staticmethod
    def find(partition: Partition, space: int, key: bytes, token: bytes) -> Hold | None:
        """Return the hold of a token, if it is here."""
        entry = partition.spaces[space].get(key)
        if entry is None:
            return None
        holds = entry.holds
        if len(holds) == 1:  # as of nearly every lock: there is no number to look for
            for hold in holds.values():
                return hold if compare_digest(hold.token, token) else None
        try:
            found = holds.get(int(token[:16], 16))
        except ValueError:
            return None
        return found if found is not None and compare_digest(found.token, token) else None

    def free(self, hold: Hold, now: float, effects: list[Effect]) -> None:
        """End a hold, and give its slot to the next."""
        if hold.chain is not None:
            self.deadlines.clear(hold)
        entry = hold.entry
        del entry.holds[hold.fence]
        self.counts.held.add(now - hold.since)
        if self.changes is not None:
            self.note(hold)
        if entry.partition.recovers_until is not None:
            entry.partition.doubted.discard(hold)
            # A renewal may come after the release, by another way. During a recovery an authentic
            # token is proof enough: without this note it would bring the hold back beside the next one.
            name = entry.space, entry.key
            entry.partition.remember_end(name, hold.fence, is_sole=hold.is_sole)
        if hold.owner is not None:
            owners.discard(entry, hold)
        peer = hold.peer
        if peer is not None:
            del peer.holds[hold]
            if peer.granted is hold:
                peer.granted = None  # they refer to each other
        self.forget_enqueue(hold)
        queue = entry.waiters
        if queue is not None:
            if queue.is_grouped:
                queue.end(hold.fence)
            if queue.listener is not None:
                self.answer_listener(queue.listener, Status.LEASE_EXPIRED, effects)
            if queue.rate is not None:
                # A run that has not said when it began may have begun until now.
                if hold.told:
                    self.rates.begin(queue.rate, hold.fence, now)
                else:
                    self.rates.give_back(queue.rate, hold.fence)
            if queue.line or queue:
                self.promote(entry, now, effects)
                return
        if not entry.holds:
            self.remove(entry)

    # The queue.

    def is_full(self, entry: Entry) -> bool:
        """Whether as many wait as may."""
        most = self.limits.max_waiters
        return most > 0 and entry.waiters is not None and entry.waiters.present >= most

    def join(
        self,
        entry: Entry,
        peer: Peer,
        lease: int,
        now: float,
        owner: Owner | None,
        label: bytes,
        group: FairGroup | None,
        *,
        two_phase: bool,
        is_rated: bool = False,
        turn: float | None = None,
    ) -> Waiter:
        """Let somebody stand in line."""
        waiter = Waiter(
            *(entry, peer, next(self.arrivals), lease, now),
            two_phase=two_phase,
            owner=owner,
            label=label,
            group=group,
        )
        queue = entry.waiters
        if group is not None:
            queue = entry.grouped()
        elif queue is None:
            queue = entry.queue()
        if is_rated:
            waiter.is_rated = True
        if turn is not None:
            waiter.turn, waiter.process = turn, peer.process
            self.reservations.name(waiter)
        if queue.is_grouped or is_rated or turn is not None:
            queue.join(waiter)
        else:
            queue.line[waiter] = None
        if owner is not None:
            owners.add(entry, waiter)
        self.counts.queued += 1
        if queue.rate is not None:
            self.wake(queue, queue.rate, now)
        return waiter

    def block(self, waiter: Waiter, timeout: int, now: float) -> None:
        """Let a waiter wait for so many seconds, which end nothing while it is its turn."""
        waiter.peer.waiting = waiter
        waiter.peer.granted = None
        waiter.until = now + timeout
        if not waiter.is_told:
            waiter.state = WAITING
            self.deadlines.set(waiter, timeout, now)

    def hand(self, waiter: Waiter, peer: Peer, turn: float | None, *, is_rated: bool) -> None:
        """Let a waiter in line be of another peer, which wants such a turn, or a grant."""
        waiter.peer, waiter.turn = peer, turn
        process = peer.process if turn is not None else None
        waiter.entry.queue().change(waiter, process, is_rated=is_rated)
        if turn is not None:
            self.reservations.name(waiter)

    def unblock(self, waiter: Waiter, reply: Reply, effects: list[Effect]) -> None:
        """Answer the connection that is blocked on a position, if one is; that stays."""
        peer = waiter.peer
        if peer.waiting is waiter:
            if waiter.state == WAITING:
                self.deadlines.clear(waiter)
                waiter.state = QUEUED
            peer.waiting = None
            effects.append((peer.id, reply))

    def end_wait(self, waiter: Waiter, now: float, effects: list[Effect]) -> Reply:
        """Return what the end of a wait for lack of time is answered with; others may go on then.

        The waiter's deadline is not set any more. No position is kept for longer than any lease may
        last.
        """
        leaves_room, reply = waiter.leaves_room, self._out_of_time(waiter, now)
        if leaves_room:
            self.look_after(waiter, now, effects)
        return reply

    def _out_of_time(self, waiter: Waiter, now: float) -> Reply:
        most = self.limits.max_lease * 1000
        reserve = waiter.reserve
        if reserve is None or max(reserve) > most or not self.reservations.has_room(waiter):
            self.counts.timed_out += 1
            self.give_up(waiter)
            return Status.TIMEOUT
        if waiter.state == WAITING:
            waiter.peer.waiting = None
        if waiter.two_phase:  # else its peer may have enqueued as well
            self.forget_waiter(waiter)
        # The next server of its shard may know it by the ticket that it has already.
        entry = waiter.entry
        ticket = waiter.ticket or entry.partition.issuer.ticket(entry.space, entry.key)
        due = now + reserve.away / 1000
        reservation = ReservedPosition(due, reserve.hold / 1000, due + RESERVED_LATE)
        self.reservations.reserve(waiter, ticket, reservation, now)
        self.counts.kept += 1
        return TimedOut(ticket)

    def look_after(self, waiter: Waiter, now: float, effects: list[Effect]) -> None:
        """Go on where somebody is away or gone who has left room."""
        if self.is_here(waiter.entry):
            self.promote(waiter.entry, now, effects)

    def leave(self, waiter: Waiter) -> bool:
        """Take a waiter out of its queue. Nobody moves up: a slot that was held for it stays free.

        Returns:
            Whether to `look_after` that, for others may have their turn.
        """
        if waiter.state == LISTENING:
            self.listen_no_more(waiter)
            return False
        leaves_room = waiter.leaves_room
        if waiter.state == WAITING:
            self.deadlines.clear(waiter)
        elif waiter.is_told:
            self.reservations.come_back(waiter, waiter.entry)
        self.give_up(waiter)
        return leaves_room

    def give_up(self, waiter: Waiter) -> None:
        """Take a waiter whose deadline is no longer set out of its queue."""
        entry = waiter.entry
        entry.queue().remove(waiter)
        if waiter.turn is not None:
            del entry.partition.reserved[waiter.ticket]
        if waiter.owner is not None or waiter.away_age:
            owners.discard(entry, waiter)
        self.counts.gave_up += 1
        self.remove_unused(entry)
        if waiter.peer.waiting is waiter:
            waiter.peer.waiting = None
        if waiter.two_phase:
            self.forget_waiter(waiter)
        waiter.state = GONE

    @staticmethod
    def listen_no_more(waiter: Waiter) -> None:
        """Let who holds a lock not wait any more to hear that somebody newer wants it."""
        waiter.entry.queue().listener = waiter.peer.waiting = None
        waiter.state = GONE

    def oust(self, waiter: Waiter, entry: Entry, answer: Superseded, effects: list[Effect]) -> None:
        """Send a waiter away, which is of an entry whatever it was left at: a newer one has come."""
        self.counts.ousted += 1
        if waiter.peer.waiting is waiter:
            effects.append((waiter.peer.id, answer))
        if waiter.is_away:
            self.reservations.come_back(waiter, entry)
        self.leave(waiter)

    def answer_listener(self, waiter: Waiter, answer: Reply, effects: list[Effect]) -> None:
        """Answer who listens, and let it not wait any more."""
        self.listen_no_more(waiter)
        effects.append((waiter.peer.id, answer))

    def forget_waiter(self, waiter: Waiter) -> None:
        """Let its peer have it no more."""
        waiter.peer.enqueued.pop((waiter.entry.space, waiter.entry.key), None)

    def forget_enqueue(self, hold: Hold) -> None:
        """Let the peer that enqueued have it no more: its `wait` would answer with this hold."""
        if hold.waiter is not None:
            self.forget_waiter(hold.waiter)
            hold.waiter.state = GONE
            hold.waiter = None  # which refers to it

    def promote(self, entry: Entry, now: float, effects: list[Effect]) -> None:
        """Give free slots to the waiters, first come, first served, or tell them of their turn."""
        if entry.partition.withholds(now):
            # Another server may have the shard, and may have granted this very slot.
            self.withheld[entry] = None
            return
        queue, most = entry.queue(), min(entry.limit, self.max_holds)
        if queue.pause is not None:
            return
        # Many slots can become free in one step: all of that together is not to be too much for it.
        line, rate, steps = queue.line, queue.rate, 1 if queue.pending else STEP
        for _ in range(steps):
            free = most - len(entry.holds)
            is_simple = not (queue.away or queue.returned or queue.told or queue.processes)
            if rate is not None or queue.is_grouped or not is_simple:
                found = self.first(queue, free, now)
                if found is None:
                    break
                if queue.leaves_out(found):
                    continue
                if not queue.is_room_for(found, entry.limit, len(entry.holds)):
                    break
                waiter = found
            elif free > 0 and line:
                waiter = next(iter(line))
            else:
                break
            if waiter.state == RESERVED:
                self.reservations.hold_or_pass(queue, waiter, now)
            elif waiter.peer.ended:
                # Its connection is being taken out, in steps. A grant now would be released a few steps
                # later, and nobody would have used it.
                self.give_up(waiter)
            elif entry.aged and (
                (newer := entry.partition.newer_than(entry.key, waiter.age)) is not None
            ):
                self.oust(waiter, entry, newer, effects)
            else:
                if queue.is_grouped:
                    queue.use_turn(waiter)
                self.serve(queue, waiter, now, effects)
        else:
            self.go_on_later(entry, queue, now)
        if rate is not None or queue.processes:
            self._look_ahead(entry, queue, most - len(entry.holds), now)
        if not entry.holds:
            self.remove_unused(entry)

    @staticmethod
    def first(queue: Queue[Waiter], free: int, now: float) -> Waiter | None:
        """Return whose turn it is with so many free slots; all that it needs may not be free yet."""
        rate = queue.rate
        return queue.first(free, free if rate is None else rate.free(now) - queue.places)

    def _look_ahead(self, entry: Entry, queue: Queue[Waiter], free: int, now: float) -> None:
        """See to it that those who are left are looked at: with the next place, and if they ask.

        That is noted of processes that do not ask while a slot is free that they could have.
        """
        if queue.rate is not None and queue:
            self.wake(queue, queue.rate, now)
        if not queue.processes:
            return
        has_place = queue.rate is None or queue.rate.free(now) > queue.places
        has_slot = free > len(queue.told) and entry.limit > len(entry.holds) + queue.set_aside
        if has_slot and (has_place or queue.has_plain):
            for process in queue.processes:
                if process.asking is None:
                    process.starved[entry] = None

    def find_turn(self, process: ClientProcess, now: float, effects: list[Effect]) -> None:
        """Tell a process that asks of a turn that is there already, if one is.

        Where it could have had one longest is looked at first. A key that has more for it comes last
        after that.
        """
        for _ in range(min(STEP, len(process.starved))):
            if process.asking is None:
                return
            entry, _ = process.starved.popitem(last=False)
            self.promote(entry, now, effects)
        if process.asking is not None and process.starved:
            self.later(partial(self._go_on_finding, process), now)

    def _go_on_finding(self, process: ClientProcess, now: float, effects: list[Effect]) -> bool:
        self.find_turn(process, now, effects)
        return True

    def look_behind(self, process: ClientProcess, now: float) -> None:
        """See to it that those go on who wait behind a process, which asks by now, or asks no more.

        In other steps: this one may be about another key, or in the midst of that.
        """
        if process.behind:
            self.later(partial(self._go_on_behind, process, len(process.behind)), now)

    def _go_on_behind(
        self, process: ClientProcess, most: int, now: float, effects: list[Effect]
    ) -> bool:
        # No more than there were: those who wait behind it again are noted again.
        for _ in range(min(STEP, most, len(process.behind))):
            lane, found = process.behind.popitem(last=False)
            entry: Entry = found
            entry.queue().let_in(lane)
            self.promote(entry, now, effects)
        if most > STEP:
            self.later(partial(self._go_on_behind, process, most - STEP), now)
        return True

    def pass_on(self, waiter: Waiter, now: float, effects: list[Effect]) -> None:
        """Let others have the slot that is held for somebody, who is in line again if it was told."""
        if self.reservations.pass_on(waiter, now):
            self.promote(waiter.entry, now, effects)

    def wake(self, queue: Queue[Waiter], rate: KeyRate, now: float) -> None:
        """See to it that a waiter gets the next place."""
        self.rates.wake(rate, queue.places + queue.missing, now)

    def go_on_with(self, waiter: Waiter, has_slot: bool, now: float, effects: list[Effect]) -> None:
        """Serve somebody who is back in a queue: at once if there is a slot for it alone."""
        entry, queue = waiter.entry, waiter.entry.queue()
        rate, holders = queue.rate if waiter.is_rated else None, len(entry.holds)
        has_place = rate is None or rate.free(now) - queue.places >= min(waiter.weight, rate.runs)
        is_open = has_place and holders + len(queue.told) < self.max_holds and queue.pause is None
        if (
            has_slot
            and is_open
            and waiter.can_start
            and queue.can_go_on(waiter, entry.limit, holders)
        ):
            self.serve(queue, waiter, now, effects)
        self.promote(entry, now, effects)

    def serve(
        self, queue: Queue[Waiter], waiter: Waiter, now: float, effects: list[Effect]
    ) -> None:
        """Grant a waiter of a queue its slot, or tell it of its turn if it wants that."""
        if waiter.turn is not None:
            self.tell(waiter, waiter.turn, now, effects)
            return
        entry, peer = waiter.entry, waiter.peer
        rate = queue.rate if waiter.is_rated else None
        if waiter.owner is not None:
            owners.discard(entry, waiter)
        lease, owner, label = waiter.lease, waiter.owner, waiter.label
        if queue.is_grouped:
            hold = self.grant_share(entry, peer, lease, owner, label, now, rate, waiter.group)
            queue.remove(waiter)  # not before: its partition is not to be forgotten
        else:
            hold = self.grant(entry, peer, lease, owner, label, now, rate)
            if waiter in queue.line:
                del queue.line[waiter]
            else:
                queue.remove(waiter)
        self.counts.waited.add(now - waiter.since)
        queue.has_served(waiter.since, now)
        if waiter.state == WAITING:
            self.deadlines.clear(waiter)
            peer.waiting = None
            peer.granted = hold
            if waiter.two_phase:
                self.forget_waiter(waiter)
            waiter.state = GONE
            self.note(hold)
            effects.append((peer.id, Granted(hold.token, waiter.lease)))
        else:
            waiter.state = UNTOLD
            hold.told = False
            waiter.hold = hold
            hold.waiter = waiter

    def tell(self, waiter: Waiter, turn: float, now: float, effects: list[Effect]) -> None:
        """Hold a slot for a waiter in line, and tell its process, which asks whose turn it is."""
        process = waiter.process
        assert process is not None
        asking: Peer = process.asking
        self.reservations.tell(waiter, turn, now)
        asking.told, waiter.told_on = waiter, asking
        answer_asking(process, YourTurn(waiter.ticket), effects)
        self.look_behind(process, now)

    def go_on_later(self, entry: Entry, queue: Queue[Waiter], now: float) -> None:
        """Go on with an entry in another step."""
        if not queue.pending:
            queue.pending = True
            self.later(partial(self.go_on, entry), now)

    def go_on(self, entry: Entry, now: float, effects: list[Effect]) -> bool:
        """Go on with an entry."""
        entry.queue().pending = False
        if self.is_here(entry):
            self.promote(entry, now, effects)
        return True

    @staticmethod
    def is_here(entry: Entry) -> bool:
        """Whether an entry is in the table."""
        return entry.partition.spaces[entry.space].get(entry.key) is entry

    # Pauses.

    def pause(self, entry: Entry, record: PauseRecord, left: float, now: float) -> None:
        """Grant nothing of a key for so many seconds, or until `resume`; the latest pause counts.

        Whether a key is paused matters where somebody could have a turn: in `promote`, in `go_on_with`
        and for a newcomer. All of that is behind its queue, which a key has not that is free.
        """
        queue = entry.queue()
        if queue.pause is not None:
            self._end_pause(queue.pause)
        queue.pause = pause = KeyPause(entry, record)
        self.paused += 1
        if left < NEVER:
            self.deadlines.set(pause, left, now)
        if self.changes is not None:
            self.changes.append(pause)

    def resume(self, pause: KeyPause, now: float, effects: list[Effect]) -> None:
        """End a pause, and serve those who wait; without any, or a holder, the key is forgotten."""
        self._end_pause(pause)
        if self.changes is not None:
            self.changes.append(pause)
        self.promote(pause.entry, now, effects)

    def drop_pause(self, entry: Entry) -> None:
        """Let a key that leaves not be paused here any more."""
        if entry.pause is not None:
            self._end_pause(entry.pause)

    def _end_pause(self, pause: KeyPause) -> None:
        pause.ended = True
        pause.entry.queue().pause = None
        self.paused -= 1
        if pause.chain is not None:
            self.deadlines.clear(pause)

    # Time.

    def expire(self, now: float, effects: list[Effect]) -> None:
        """Let what is due take effect, but no more of it than fits a step."""
        for _ in range(STEP):
            item = self.deadlines.pop(now)
            if item is None:
                return
            if isinstance(item, Hold):
                self.lapse(item, now, effects)
            elif isinstance(item, Waiter):
                self.time_out(item, now, effects)
            elif isinstance(item, KeyRate):
                self.next_place(item, now, effects)
            elif isinstance(item, PackedRates):
                self.rates.drop(item)
            elif isinstance(item, KeyPause):
                self.resume(item, now, effects)

    def lapse(self, hold: Hold, now: float, effects: list[Effect]) -> None:
        """End a hold that is due."""
        if hold.detached:
            self.counts.lapsed += 1
        else:
            self.counts.expired += 1
        self.free(hold, now, effects)

    def time_out(self, waiter: Waiter, now: float, effects: list[Effect]) -> None:
        """End a wait that is due."""
        if waiter.state == WAITING:
            number, before = waiter.peer.id, len(effects)
            effects.insert(before, (number, self.end_wait(waiter, now, effects)))
        elif self.reservations.expire(waiter, now):
            self.promote(waiter.entry, now, effects)

    def next_place(self, rate: KeyRate, now: float, effects: list[Effect]) -> None:
        """Give the free places to waiters, or forget the rate."""
        entry: Entry | None = rate.book.entries[rate.space].get(rate.key)
        queue = entry.waiters if entry is not None else None
        is_over = self.rates.look_again(rate, now, is_used=queue is not None and bool(queue))
        if entry is None or queue is None:
            return
        if is_over:
            queue.rate = None
        if queue:
            self.promote(entry, now, effects)

    def later(self, job: Job, now: float) -> None:
        """Have something go on with the next steps."""
        self.backlog.append(job)
        self.behind = now

    def in_steps(
        self,
        items: Iterable[T],
        work: Callable[[T, float, list[Effect]], None],
        now: float,
        effects: list[Effect],
    ) -> None:
        """Do something with each of many, as many of them now as fit a step."""
        job = partial(some, iter(items), work)
        if not job(now, effects):
            self.later(job, now)

    def catch_up(self, now: float, effects: list[Effect]) -> None:
        """Go on with what was more than fits a step."""
        job = self.backlog.popleft()
        if not job(now, effects):
            self.backlog.append(job)


def answer_asking(process: ClientProcess, reply: Reply, effects: list[Effect]) -> None:
    """Answer a process that asks whose turn it is, if it does."""
    peer: Peer | None = process.asking
    if peer is not None:
        process.asking = peer.waiting = None
        effects.append((peer.id, reply))


def some(
    items: Iterator[T],
    work: Callable[[T, float, list[Effect]], None],
    now: float,
    effects: list[Effect],
) -> bool:
    """Do something with the next few of many; say whether these were the last."""
    for number, item in enumerate(items, 1):
        work(item, now, effects)
        if number >= STEP:
            return False
    return True
