"""The rules of the lock table, written down a second time in the plainest way: lists and loops.

It is slow and obviously right, and knows nothing of the real table. It makes no tokens: a grant that
somebody sees is told its token from outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dflockd.table import HoldRecord
from dflockd.wire import InGroup
from tests.dflockd.table.naive_rules import NaiveRules
from tests.dflockd.table.naive_state import (
    Answer,
    Hold,
    Key,
    Name,
    Owner,
    Peer,
    Waiter,
    rounded,
)
from tests.dflockd.table.naive_waiters import NaiveWaiters


class NaiveTable(NaiveRules, NaiveWaiters):
    """The model. Every method returns the answers in the order in which they are sent."""

    def taken(self) -> list[Answer]:
        answers, self.answers = self.answers, []
        for key in self.keys.values():
            self._look_at_groups(key)
        return answers

    def connect(self, peer: int) -> None:
        self.peers[peer] = Peer()

    def advance(self, places: Iterable[tuple[float, float, Name]] = ()) -> None:
        """Let happen what is due.

        Args:
            places: when places may be free again of rates, each with how long before that was said.
        """
        for at, span, name in places:
            self._expire((at, span))
            if name in self.keys:
                before = self.grants
                self._serve(name)
                self.seen["a place that is free again"] += self.grants > before
        self._expire()

    def _expire(self, before: tuple[float, float] = (math.inf, 0.0)) -> None:
        while True:
            due = [
                (x.deadline, x.span, x.since, x)
                for x in self.timed()
                if x.deadline is not None and x.deadline <= self.now
                if (x.deadline, x.span) < before
            ]
            if not due:
                return
            # What falls due together: the shorter span first, then what was set first.
            first = min(due, key=lambda row: row[:3])[3]
            for key in self.keys.values():
                self._look_at_groups(key)
            if isinstance(first, Hold):
                self._end(first)
            elif first.is_told:
                if first.owner and first.owner[2]:
                    self.keys[first.name].silent[first.owner[2]] += 1
                self._pass_on(first)
            elif first.reservation:
                self._end_reservation(first, first.reservation)
            else:
                self._end_wait(first)

    def disconnect(self, number: int, *, clean: bool, silent: bool, told: bool = True) -> None:
        peer = self.peers.pop(number)
        for key in list(self.keys.values()):
            for waiter in list(key.queue):
                if waiter.peer == number and not waiter.is_told:
                    key.queue.remove(waiter)
        # Who has waited for a place may have been the last one there.
        self.keys = {name: key for name, key in self.keys.items() if key.holds or key.queue}
        for waiter in peer.enqueued:
            waiter.peer = 0
        self.advance()
        for waiter in peer.enqueued:
            if waiter.is_told:
                self.seen["told and gone"] += 1
                self._has_spoken(waiter)  # by that
                self.keys[waiter.name].queue.remove(waiter)
                self._serve(waiter.name)
        owned = [hold for hold in self.holds() if hold.peer == number]
        for hold in sorted(owned, key=lambda hold: hold.owned_since):
            if hold.token is None or (hold is peer.granted and not told):
                self._end(hold, has_begun=False)  # nobody was told, so nobody holds it
            elif self.keeps_holds or not self.limits.auto_release or peer.detaches or silent:
                hold.peer = None
            elif self.limits.orphan_ttl == 0 or (clean and not self.limits.orphan_all):
                self._end(hold)
            else:
                hold.peer = None
                if self.now + self.limits.orphan_ttl < hold.deadline:
                    self._set(hold, self.limits.orphan_ttl)

    def drain(self, *, keep: bool) -> None:
        self.advance()
        self.keeps_holds = keep
        self.draining = True
        for number, peer in self.peers.items():
            if peer.waiting or peer.listening:
                if peer.waiting:
                    self._leave(peer.waiting)
                peer.listening = None
                self.answers.append(Answer(number, "error_draining"))
            for waiter in list(peer.enqueued):
                if waiter.hold is None:
                    self._leave(waiter)
        for peer in self.peers.values():
            for waiter in list(peer.enqueued):
                if waiter.hold and waiter.hold.token is None:
                    self._end(waiter.hold, has_begun=False)

    def crash(self, kept: list[HoldRecord], recovers_until: float) -> None:
        """Go on with nothing but some of the holds whose tokens are known to somebody."""
        known = {self._fence(hold): hold for hold in self.holds() if hold.token}
        self.peers, self.keys, self.away, self.ended = {}, {}, [], set()
        self.kept = self.forgotten = 0
        self.recovers_until = recovers_until
        for record in kept:
            later = [each for each in kept if each.space == 0 and each.key == record.key]
            if record.space == 0 and record.fence < max(each.fence for each in later):
                continue
            hold = known[record.fence]
            key = self.keys.setdefault(hold.name, Key(record.limit))
            key.is_grouped |= hold.group != b""
            key.limit = key.limit or record.limit
            key.holds.append(hold)
            hold.peer = None
            hold.is_doubted = recovers_until > self.now
            until = max(record.deadline, recovers_until if hold.is_doubted else 0)
            self._set(hold, rounded(until - self.now))
        for rate in self.rates.values():  # what nobody was told of has not begun
            rate.pending = [hold for hold in rate.pending if hold in self.holds()]

    def acquire(self, peer: int, name: Name, limit: int, timeout: int, lease: int | None) -> None:
        self.first = len(self.answers)
        group, self.peers[peer].group = self.peers[peer].group, None
        kept = self._taken_up(peer, name)
        answer = self._refusal(name, limit, lease)
        if not answer:
            answer = self._newest_wins(peer, name, kept)
        key = self.keys.get(name)
        span = self._lease(lease)
        if answer:
            self._reply(peer, answer)
        elif not kept and (there := self._there(peer, key)) is not None:
            if isinstance(there, Waiter) and self._is_the_same(there, peer):
                if self._has_too_much(peer, two_phase=False):
                    self._reply(peer, "error_max_holds")
                    return
                has_slot = self._take_over(there, peer, span, two_phase=False)
                self._block(there, timeout)
                self._go_on_with(there, has_slot)
            else:
                self._conflict(peer, there)
        elif self._too_many(peer, key, limit, kept, two_phase=False):
            self._reply(peer, "error_max_holds")
        elif kept:
            has_slot = self._come_back(kept, peer, limit, span, two_phase=False)
            self._block(kept, timeout)
            self._go_on_with(kept, has_slot)
        else:
            self._acquire_anew(peer, name, limit, timeout, span, group)

    def _acquire_anew(
        self, peer: int, name: Name, limit: int, timeout: int, span: int, group: InGroup | None
    ) -> None:
        has_room = self._has_room_for(name, group)
        key = self.keys.setdefault(name, Key(limit))
        if has_room:
            self._reply(peer, "granted", self._grant(name, peer, span, group), span)
        elif self._full(key):
            self._reply(peer, "error_max_waiters")
        elif timeout == 0:
            self._reply(peer, "timeout")
            if not key.holds and not key.queue:
                self.seen["a try that finds no place"] += 1
                del self.keys[name]
        else:
            waiter = Waiter(name, peer, span, two_phase=False, number=self._arrival())
            waiter.owner, waiter.group = self.peers[peer].owner, group
            self._join(key, waiter)
            self._block(waiter, timeout)

    def enqueue(self, peer: int, name: Name, limit: int, lease: int | None) -> None:
        self.first = len(self.answers)
        turn, self.peers[peer].turn = self.peers[peer].turn, None
        group, self.peers[peer].group = self.peers[peer].group, None
        kept = self._taken_up(peer, name)
        answer = self._refusal(name, limit, lease)
        span = self._lease(lease)
        if span <= self.limits.max_lease and self._waiter(peer, name):
            answer = "error_already_enqueued"
        if not answer:
            answer = self._newest_wins(peer, name, kept)
        key = self.keys.get(name)
        there = None if answer or kept else self._there(peer, key)
        if isinstance(there, Waiter) and self._is_the_same(there, peer):
            if self._has_too_much(peer, two_phase=True):
                self._reply(peer, "error_max_holds")
                return
            has_slot = self._take_over(there, peer, span, two_phase=True)
            self._queue_up(there, peer, turn, has_slot)
            return
        if there is not None:
            self._conflict(peer, there)
            return
        if not answer and self._too_many(peer, key, limit, kept, two_phase=True):
            answer = "error_max_holds"
        if answer:
            self._reply(peer, answer)
            return
        if kept:
            has_slot = self._come_back(kept, peer, limit, span, two_phase=True)
            self._queue_up(kept, peer, turn, has_slot)
            return
        waiter = Waiter(name, peer, span, two_phase=True, number=self._arrival())
        waiter.owner, waiter.group = self.peers[peer].owner, group
        has_room = self._has_room_for(name, group)
        key = self.keys.setdefault(name, Key(limit))
        if turn is None and has_room:
            waiter.hold = self._grant(name, peer, span, group)
            self._reply(peer, "acquired", waiter.hold, span)
            self.peers[peer].enqueued.append(waiter)
        elif self._full(key):
            self._reply(peer, "error_max_waiters")
        else:
            self._join(key, waiter)
            self._queue_up(waiter, peer, turn, False)

    def _queue_up(self, waiter: Waiter, peer: int, turn: float | None, has_slot: bool) -> None:
        """Have somebody wait by enqueue, who is answered before all others."""
        waiter.turn = turn
        self.peers[peer].enqueued.append(waiter)
        self._go_on_with(waiter, has_slot)
        kind = "acquired" if waiter.hold else "turn" if waiter.is_told else "queued"
        self.seen["told at once"] += kind == "turn"
        answer = Answer(peer, kind, waiter.hold, waiter.lease, waiter)
        self.answers.insert(self.first, answer)

    def want_turn(self, peer: int, milliseconds: int) -> None:
        if milliseconds > self.limits.max_lease * 1000:
            self._answer(peer, "error")
        else:
            self.peers[peer].turn = milliseconds / 1000
            self._answer(peer, "ok")

    def in_group(self, peer: int, group: InGroup) -> None:
        self.peers[peer].group = group
        self._answer(peer, "ok")

    def let_pass(self, peer: int, name: Name, ticket: bytes) -> None:
        """Let others go before whoever has that ticket."""
        for waiter in [*self.away, *self.told()]:
            if waiter.name == name and waiter.ticket == ticket:
                self._answer(peer, "ok")
                self._has_spoken(waiter)
                if waiter.has_slot:
                    self.seen["passed on"] += 1
                    self._pass_on(waiter)
                return
        self._answer(peer, "error")

    def reserve(self, peer: int, away: int, hold: int) -> None:
        if away > self.limits.max_lease * 1000 or hold > self.limits.max_lease * 1000:
            self._answer(peer, "error")
        else:
            self.peers[peer].reserve = (away, hold)
            self._answer(peer, "ok")

    def resume(self, peer: int, ticket: bytes) -> None:
        self.peers[peer].resumes = ticket
        self._answer(peer, "ok")

    def wait(self, peer: int, name: Name, timeout: int) -> None:
        reserve, self.peers[peer].reserve = self.peers[peer].reserve, None
        waiter = self._waiter(peer, name)
        if waiter is None:
            owner, newest = self.peers[peer].owner, self.newest.get(name[1], 0)
            is_older = name[0] == 0 and owner and 0 < owner[3] < newest
            self._answer(peer, f"superseded {newest}" if is_older else "error_not_enqueued")
        elif waiter.hold is not None:
            self.peers[peer].enqueued.remove(waiter)
            self._set(waiter.hold, waiter.lease)
            self._answer(peer, "granted", waiter.hold, waiter.lease)
        else:
            first = len(self.answers)
            if waiter.is_told and not waiter.has_slot:
                self._has_spoken(waiter)
                waiter.is_told = False
                self._note_group(self.keys[name], waiter.group)
                self._serve(name)
                self.seen["told later" if waiter.is_told else "waits again"] += 1
            if waiter.is_told:
                self.seen["told when it asks"] += 1
                self.answers.insert(first, Answer(peer, "turn", waiter=waiter))
                return
            waiter.reserve = reserve
            if timeout == 0:
                self._end_wait(waiter)
            else:
                self._block(waiter, timeout)

    def release(self, peer: int, name: Name, token: bytes) -> None:
        hold = self._by_token(name, token)
        if hold is None:
            fence = self._forgotten(name, token)
            self._answer(peer, "error" if fence is None else "ok")
            if fence is not None:
                self.ended.add((name, token))
                self._end_earlier(name, fence)
        else:
            self._answer(peer, "ok")
            self._end(hold)

    def begun(self, peer: int, name: Name, token: bytes, lease: int | None) -> None:
        self.renew(peer, name, token, lease)
        hold = self._by_token(name, token)
        if hold is not None and self._lease(lease) <= self.limits.max_lease and name in self.rates:
            self.rates[name].begin(hold, self.now)

    def unbegun(self, peer: int, name: Name, token: bytes) -> None:
        hold = self._by_token(name, token)
        if hold is not None and name in self.rates and hold in self.rates[name].pending:
            self.rates[name].pending.remove(hold)
            self.seen["a place that is given back"] += 1
        self.release(peer, name, token)

    def confirm(self, peer: int, name: Name, token: bytes, lease: int | None) -> None:
        self.renew(peer, name, token, lease, brings_back=False)

    def renew(
        self, peer: int, name: Name, token: bytes, lease: int | None, *, brings_back: bool = True
    ) -> None:
        hold = self._by_token(name, token)
        span = self._lease(lease)
        if hold and span <= self.limits.max_lease and self.now < self.recovers_until:
            if hold.is_doubted and not brings_back:
                self._answer(peer, self._recovering())
                return
            hold.is_doubted = False
        if hold is None and span <= self.limits.max_lease and brings_back:
            hold = self._brought_back(peer, name, token)
        if hold is None or span > self.limits.max_lease:
            self._answer(peer, "error")
            return
        self._set(hold, span)
        if hold.peer != peer:
            hold.peer = peer
            hold.owned_since = self._tick()
        self._answer(peer, "renewed", None, span)

    def detach(self, peer: int, name: Name, token: bytes, lease: int | None) -> None:
        hold = self._by_token(name, token)
        span = self._lease(lease)
        if span > self.limits.max_detached_lease:
            self._answer(peer, "error")
        elif hold is None or hold.peer not in (peer, None):
            self._answer(peer, "error_lease_expired")
        else:
            self._set(hold, span)
            hold.peer = hold.owner = None
            hold.is_doubted = False
            self._answer(peer, "renewed", None, span)

    def evict(self, peer: int, name: Name, token: bytes) -> None:
        hold = self._by_token(name, token)
        self._answer(peer, "ok" if hold else "error")
        if hold:
            self._end(hold)

    def stable_ref(self, peer: int) -> None:
        self._answer(peer, "error" if self.peers[peer].detaches else "ok")
        self.peers[peer].detaches = True

    def say(self, peer: int, kind: str) -> None:
        self._answer(peer, kind)

    def own(self, peer: int, owner: Owner | None) -> None:
        self.peers[peer].owner = owner
        self._answer(peer, "ok")
