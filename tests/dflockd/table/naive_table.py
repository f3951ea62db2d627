"""The rules of the lock table, written down a second time in the plainest way: lists and loops.

It is slow and obviously right, and knows nothing of the real table. It makes no tokens: a grant that
somebody sees is told its token from outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from dflockd.table import HoldRecord
from dflockd.table.pauses import PauseRecord
from dflockd.wire import (
    Acquire,
    Barrier,
    Enqueue,
    Evict,
    How,
    Listen,
    Malformed,
    Next,
    Pass,
    Ping,
    Release,
    Renew,
    Request,
    Resume,
    StableRef,
    Stats,
    Unbegun,
    Wait,
)
from dflockd.wire import Pause as PauseAsked
from tests.dflockd.table.naive_rules import NaiveRules
from tests.dflockd.table.naive_state import Answer, Hold, Key, Name, Pause, Peer, Waiter, rounded
from tests.dflockd.table.naive_waiters import NaiveWaiters, superseded

SAID_AT_ONCE = {Ping: "ok", Barrier: "ok", Malformed: "error", Stats: "stats"}


class NaiveTable(NaiveRules, NaiveWaiters):
    """The model. Every method returns the answers in the order in which they are sent."""

    def taken(self) -> list[Answer]:
        answers, self.answers = self.answers, []
        for key in self.keys.values():
            self._look_at_groups(key)
        return answers

    def connect(self, peer: int, instance: bytes) -> None:
        self.peers[peer] = Peer(instance)

    def handle(self, peer: int, request: Request) -> None:
        """Handle what somebody asks who does not wait for anything."""
        self.first = len(self.answers)
        if self.draining and not isinstance(request, Release | Renew | Unbegun):
            self._answer(peer, "error_draining")
        elif type(request) in SAID_AT_ONCE:
            self._answer(peer, SAID_AT_ONCE[type(request)])
        else:
            handlers: dict[type, Callable[[int, Any], None]] = {
                Acquire: self.acquire,
                Enqueue: self.enqueue,
                Wait: self.wait,
                Release: self.release,
                Unbegun: self.unbegun,
                Renew: self.renew,
                Next: self.next,
                Pass: self.let_pass,
                Listen: self.listen,
                Evict: self.evict,
                PauseAsked: self.pause,
                Resume: self.resume,
                StableRef: self.stable_ref,
            }
            handlers[type(request)](peer, request)

    def advance(self, places: Iterable[tuple[float, float, Name]] = ()) -> None:
        """Let happen what is due.

        Args:
            places: when places may be free again of rates, each with how long before that was said.
        """
        for at, span, name in places:
            self._expire((at, span))
            queue = self.keys[name].queue if name in self.keys else []
            if not queue and self.rates[name].free(self.now) == self.rates[name].runs:
                del self.rates[name]  # nothing of it counts any more
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
            elif isinstance(first, Pause):
                self.seen["a pause that ends by itself"] += 1
                self._end_pause(first.name)
            elif first.is_told:
                self._pass_on(first)
            elif first.reservation:
                self._end_reservation(first, first.reservation)
            else:
                self._end_wait_and_go_on(first, len(self.answers))

    def disconnect(
        self,
        number: int,
        places: Iterable[tuple[float, float, Name]],
        *,
        clean: bool,
        silent: bool,
        told: bool = True,
    ) -> None:
        peer = self.peers.pop(number)
        waiters = [*([peer.waiting] if peer.waiting else []), *peer.enqueued]
        gone = []
        for waiter in dict.fromkeys(waiters):
            if self.is_in_line(waiter) and not waiter.is_told:
                key = self.keys[waiter.name]
                if waiter.turn is not None or key.is_heavy():
                    gone.append(waiter)
                key.queue.remove(waiter)
        for key in list(self.keys.values()):
            for waiter in list(key.queue):
                if waiter.peer == number and not waiter.is_told:
                    key.queue.remove(waiter)
            self._look_at_groups(key)  # one that is empty now has lost its turn
        # Who has waited for a place may have been the last one there.
        self.keys = {name: key for name, key in self.keys.items() if key.is_used}
        for waiter in peer.enqueued:
            waiter.peer = 0
        self.advance(places)
        for waiter in gone:
            if waiter.name in self.keys:
                self._serve(waiter.name)
        last = peer.told
        is_its_last = last is not None and last.told_on == number and self.is_in_line(last)
        if last is not None and is_its_last and last.peer and last.is_told:
            self._be_untold(last)
        for waiter in peer.enqueued:
            if waiter.hold is None and self.is_in_line(waiter):
                self.seen["told and gone"] += 1
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
        self.keeps_holds = keep
        self.draining = True
        for number, peer in self.peers.items():
            if peer.waiting or peer.listening or peer.asks:
                if peer.waiting:
                    self._leave(peer.waiting)
                peer.listening, peer.asks = None, False
                self.answers.append(Answer(number, "error_draining"))
            for waiter in list(peer.enqueued):
                if waiter.hold is None:
                    self._leave(waiter)
        for peer in self.peers.values():
            for waiter in list(peer.enqueued):
                if waiter.hold and waiter.hold.token is None:
                    self._end(waiter.hold, has_begun=False)

    def crash(
        self, kept: list[HoldRecord], recovers_until: float, pauses: list[PauseRecord]
    ) -> None:
        """Go on with nothing but some of the holds whose tokens are known to somebody, and pauses."""
        known = {self._fence(hold): hold for hold in self.holds() if hold.token}
        self.peers, self.keys, self.away, self.ended, self.starved = {}, {}, [], set(), {}
        self.kept = self.forgotten = 0
        self.earlier = {(hold.name, hold.token) for hold in self.granted}
        self.recovers_until = recovers_until
        for record in kept:
            name = (record.space, record.key)
            alone = [each.fence for each in kept if (*each[:2], each.limit) == (*name, 1)]
            if record.fence < max(alone, default=0):
                continue  # it had ended
            hold = known[record.fence]
            key = self.keys.setdefault(hold.name, Key(record.limit))
            key.is_grouped |= hold.group != b"" or hold.weight > 1
            last = max([self._fence(each) or 0 for each in key.holds if each.limit], default=0)
            if record.limit and record.fence > last:
                key.limit = record.limit
            key.holds.append(hold)
            hold.peer = None
            hold.is_doubted = recovers_until > self.now
            until = max(record.deadline, recovers_until if hold.is_doubted else 0)
            self._set(hold, rounded(until - self.now))
        for pause in pauses:
            if pause.until > self.now:
                self.seen["a pause after a crash"] += 1
                key = self.keys.setdefault((0, pause.key), Key(1))
                key.pause = Pause((0, pause.key), pause.by, pause.reason, pause.since)
                if pause.until < math.inf:
                    self._set(key.pause, rounded(pause.until - self.now))
        if recovers_until > self.now:
            self.rates_since = recovers_until
        for rate in self.rates.values():  # what nobody was told of has not begun
            rate.closed_until = self.rates_since
            rate.pending = {h: n for h, n in rate.pending.items() if h in self.holds()}

    def _enter(
        self, peer: int, name: Name, request: Acquire | Enqueue
    ) -> tuple[str | None, Waiter | None, Waiter | None]:
        """Let somebody ask for a slot; return why not, or the position that they go on with.

        The first is taken up by a ticket, the second is what the same process has lost.
        """
        answer = self._refusal(name, request)
        kept = self._taken_up(name, request.ticket)  # whose turn may have come with that
        answer = answer or self._newest_wins(peer, name, request, kept)
        if answer:
            return answer, None, None
        self._name_rate(name, request)
        key, two_phase = self.keys.get(name), isinstance(request, Enqueue)
        lost = None if kept else self._lost(peer, key, request.owner)
        if not kept:
            answer = self._conflict_with(peer, key, request.owner)
        if not answer and self._has_too_much(peer, two_phase=two_phase):
            answer = "error_max_holds"
        if not answer and not lost and self._is_used_up(key, request.limit, kept):
            answer = "error_max_holds"
        if answer and key and not key.is_used:
            del self.keys[name]  # all who were there were older than the newest
        return answer, kept, lost

    def acquire(self, peer: int, request: Acquire) -> None:
        name = (int(request.space), request.key)
        if self._is_malformed(request):
            self._answer(peer, "error")
            return
        answer, kept, lost = self._enter(peer, name, request)
        if answer:
            self._reply(peer, answer)
        elif waiter := kept or lost:
            move = self._come_back if kept else self._take_over
            has_slot = move(waiter, peer, request, two_phase=False)
            self._block(waiter, request.timeout)
            self._go_on_with(waiter, has_slot)
        else:
            self._acquire_anew(peer, name, request)

    def _acquire_anew(self, peer: int, name: Name, request: Acquire) -> None:
        who, span = (request.owner, request.label, request.group), self._lease(request.lease)
        is_rated = request.rate is not None
        has_room = self._has_room_for(name, request.group, is_rated=is_rated)
        key = self.keys.setdefault(name, Key(request.limit))
        if has_room:
            hold = self._grant(name, peer, span, *who, is_rated=is_rated)
            self._reply(peer, "granted", hold, span)
            if request.group:
                self._look_behind(name)
        elif self._full(key):
            self._reply(peer, "error_max_waiters")
        elif request.timeout == 0 and not request.reserve:
            self._reply(peer, "timeout")
            if not key.is_used:
                self.seen["a try that finds no place"] += 1
                del self.keys[name]
        else:
            waiter = self._joining(peer, name, request, two_phase=False)
            if request.timeout == 0:
                self.answers.insert(self.first, self._end_wait(waiter))
                self._look_behind(name)
            else:
                self._block(waiter, request.timeout)
                self._look_behind(name)

    def _look_behind(self, name: Name) -> None:
        """Serve who waits behind somebody of a group that is left out since a newcomer is there."""
        if name in self.keys and self.keys[name].is_heavy():
            self._serve(name)

    def _joining(
        self, peer: int, name: Name, request: Acquire | Enqueue, *, two_phase: bool
    ) -> Waiter:
        waiter = Waiter(name, peer, 0, two_phase=two_phase, number=self._arrival())
        self._as_asked(waiter, peer, request, two_phase=two_phase)
        waiter.owner, waiter.label, waiter.group = request.owner, request.label, request.group
        self._join(self.keys[name], waiter)
        return waiter

    def enqueue(self, peer: int, request: Enqueue) -> None:
        name = (int(request.space), request.key)
        if self._is_malformed(request) or (
            request.turn is not None and not self.peers[peer].instance
        ):
            self._answer(peer, "error")
            return
        if self._waiter(peer, name):
            self._answer(peer, "error_already_enqueued")
            return
        answer, kept, lost = self._enter(peer, name, request)
        if answer:
            self._reply(peer, answer)
        elif waiter := kept or lost:
            move = self._come_back if kept else self._take_over
            self._queue_up(waiter, peer, move(waiter, peer, request, two_phase=True))
        else:
            self._enqueue_anew(peer, name, request)

    def _enqueue_anew(self, peer: int, name: Name, request: Enqueue) -> None:
        who, span = (request.owner, request.label, request.group), self._lease(request.lease)
        is_rated = request.rate is not None
        has_room = self._has_room_for(name, request.group, is_rated=is_rated)
        key = self.keys.setdefault(name, Key(request.limit))
        if request.turn is None and has_room:
            waiter = Waiter(name, peer, span, two_phase=True, number=self._arrival())
            waiter.hold = self._grant(name, peer, span, *who, is_rated=is_rated)
            self._reply(peer, "acquired", waiter.hold, span)
            self.peers[peer].enqueued.append(waiter)
            if request.group:
                self._look_behind(name)
        elif self._full(key):
            self._reply(peer, "error_max_waiters")
        else:
            waiter = self._joining(peer, name, request, two_phase=True)
            if request.turn is not None:
                self._queue_up(waiter, peer, False)
            else:
                self.peers[peer].enqueued.append(waiter)
                self._look_behind(name)
                self._reply(peer, "acquired" if waiter.hold else "queued", waiter.hold, span)

    def _queue_up(self, waiter: Waiter, peer: int, has_slot: bool) -> None:
        """Have somebody wait by enqueue, who is answered before all others."""
        self.peers[peer].enqueued.append(waiter)
        self._go_on_with(waiter, has_slot)
        kind = "acquired" if waiter.hold else "queued"
        self.seen["told at once"] += waiter.is_told
        answer = Answer(peer, kind, waiter.hold, waiter.lease, waiter)
        self.answers.insert(self.first, answer)

    def next(self, peer: int, _request: Next) -> None:
        """Wait to hear whose turn it is."""
        me = self.peers[peer]
        if not me.instance:
            self._answer(peer, "error")
            return
        former = self.asking(me.instance)
        if former is not None:
            self.seen["asked again elsewhere"] += 1
            self.peers[former].asks = False
            self._answer(former, "error")
        me.asks, me.told = True, None
        self._forget_starved()
        names = self.starved.get(me.instance, {})
        for name in list(names):
            if me.asks:
                del names[name]
                self._serve(name)
        self.seen["told when it asks"] += not me.asks

    def let_pass(self, peer: int, request: Pass) -> None:
        """Let others go before whoever has that ticket."""
        for waiter in [*self.away, *self.with_turns()]:
            if waiter.name == (0, request.key) and waiter.ticket == request.ticket:
                self._answer(peer, "ok")
                if waiter.is_told:
                    self._be_untold(waiter)
                elif waiter.has_slot:
                    self.seen["passed on"] += 1
                    self._pass_on(waiter)
                return
        self._answer(peer, "error")

    def wait(self, peer: int, request: Wait) -> None:
        name = (int(request.space), request.key)
        waiter = self._waiter(peer, name)
        if waiter is None:
            newest, label = self.newest.get(request.key, (0, b""))
            is_older = name[0] == 0 and 0 < request.age < newest
            self.seen["waited, and older"] += is_older
            self._answer(peer, superseded(newest, label) if is_older else "error_not_enqueued")
        elif waiter.hold is not None:
            self.peers[peer].enqueued.remove(waiter)
            self._set(waiter.hold, waiter.lease)
            self._answer(peer, "granted", waiter.hold, waiter.lease)
        else:
            waiter.reserve = request.reserve
            if request.timeout == 0 and not waiter.is_told:
                self._end_wait_and_go_on(waiter, self.first)
            else:
                self._block(waiter, request.timeout)

    def _end_wait_and_go_on(self, waiter: Waiter, at: int) -> None:
        """There may be a slot for who wanted to be told of a turn, or behind who wanted several."""
        goes_on = waiter.turn is not None or self.keys[waiter.name].is_heavy()
        self.answers.insert(at, self._end_wait(waiter))
        if goes_on and waiter.name in self.keys:
            self._serve(waiter.name)

    def release(self, peer: int, request: Release) -> None:
        name, token = (int(request.space), request.key), request.token
        hold = self._by_token(name, token)
        if hold is None:
            fence = self._forgotten(name, token)
            self._answer(peer, "error" if fence is None else "ok")
            if fence is not None:
                self.seen["released, though forgotten"] += 1
                self.ended.add((name, token))
                if self.was_alone(name, token):
                    self._end_earlier(name, fence)
        else:
            self._answer(peer, "ok")
            self._end(hold)

    def unbegun(self, peer: int, request: Unbegun) -> None:
        name = (0, request.key)
        hold = self._by_token(name, request.token)
        if hold is not None and name in self.rates and hold in self.rates[name].pending:
            del self.rates[name].pending[hold]
            self.seen["a place that is given back"] += 1
        self.release(peer, Release(*name, request.token))  # type: ignore[arg-type]

    def renew(self, peer: int, request: Renew) -> None:
        name = (int(request.space), request.key)
        hold, span = self._by_token(name, request.token), self._lease(request.lease)
        if request.how is How.DETACH:
            self._detach(peer, name, request, hold, span)
            return
        if span > self.limits.max_lease:
            if (name, request.token) not in self.earlier:
                self._answer(peer, "error")
                return
            span = self.limits.max_lease
        if hold is None and request.how is not How.CONFIRM:
            hold = self._brought_back(peer, name, request)
        if hold is None:
            is_confirmed = request.how is How.CONFIRM
            self._answer(peer, "error_lease_expired" if is_confirmed else "error")
            return
        if self.now < self.recovers_until:
            if hold.is_doubted and request.how is How.CONFIRM:
                self._answer(peer, self._recovering())
                return
            hold.is_doubted = False
        self._set(hold, span)
        if hold.peer != peer:
            self._forget_enqueue(hold)
            hold.peer = peer
            hold.label = request.label or hold.label
            hold.owned_since = self._tick()
        if request.how is How.BEGUN and name in self.rates:
            self.rates[name].begin(hold, self.now)
        self._answer(peer, "renewed", None, span)

    def _detach(self, peer: int, name: Name, request: Renew, hold: Hold | None, span: int) -> None:
        if span > self.limits.max_detached_lease:
            self._answer(peer, "error")
            return
        hold = hold or self._brought_back(peer, name, request)
        if hold is None or hold.peer not in (peer, None):
            self._answer(peer, "error_lease_expired")
        else:
            self._set(hold, span)
            self._forget_enqueue(hold)
            hold.peer = hold.owner = None
            hold.is_doubted = False
            self._answer(peer, "renewed", None, span)

    def evict(self, peer: int, request: Evict) -> None:
        key = self.keys.get((int(request.space), request.key), Key(1))
        hold = next((each for each in key.holds if self._fence(each) == request.fence), None)
        self._answer(peer, "ok" if hold else "error")
        if hold:
            self._end(hold)

    def pause(self, peer: int, request: PauseAsked) -> None:
        name = (0, request.key)
        if name not in self.keys and len(self.keys) >= self.limits.max_locks:
            self._answer(peer, "error_max_locks")
            return
        key = self.keys.setdefault(name, Key(1))
        self.seen["paused anew" if key.pause else "paused"] += 1
        self.seen["paused while it is held"] += bool(key.holds)
        key.pause = Pause(name, request.by, request.reason, self.now)
        if request.span is not None:
            self._set(key.pause, request.span / 1000)
        self._answer(peer, "ok")

    def resume(self, peer: int, request: Resume) -> None:
        name = (0, request.key)
        is_paused = name in self.keys and self.keys[name].pause is not None
        self._answer(peer, "ok" if is_paused else "error")
        if is_paused:
            self._end_pause(name)

    def _end_pause(self, name: Name) -> None:
        before = self.grants
        self.keys[name].pause = None
        self._serve(name)
        self.seen["granted at the end of a pause"] += self.grants > before

    def stable_ref(self, peer: int, _request: StableRef) -> None:
        self._answer(peer, "error" if self.peers[peer].detaches else "ok")
        self.peers[peer].detaches = True
