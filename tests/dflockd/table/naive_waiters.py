"""Who waits in the model: the newest alone, one for each owner, those who are told or away."""

from __future__ import annotations

import math

from dflockd.table.reservations import RESERVED_LATE
from dflockd.wire import Acquire, Enqueue, Listen, Owner
from tests.dflockd.table.naive_state import (
    Answer,
    Hold,
    Key,
    NaiveState,
    Name,
    Peer,
    ReservedPosition,
    Waiter,
    rounded,
)


class NaiveWaiters(NaiveState):
    """What becomes of who waits."""

    # The newest wins.

    def _newest_of(self, name: Name) -> tuple[int, bytes]:
        there = self.keys.get(name, Key(1))
        ages = [(i.owner.age, i.label) for i in [*there.holds, *there.order()] if i.owner]
        ages += [(i.away_age, i.label) for i in there.queue if not i.owner]
        return self.newest.get(name[1]) or max(ages, key=lambda row: row[0], default=(0, b""))

    def _newest_wins(
        self, peer: int, name: Name, request: Acquire | Enqueue, kept: Waiter | None
    ) -> str | None:
        """Send away who asks and is older than somebody, or else all who are older than that."""
        owner = request.owner
        if not owner or not owner.age:
            return None
        if not kept and (conflict := self._conflict_with(peer, self.keys.get(name), owner)):
            return conflict  # that has an end of its own
        (newest, label), age = self._newest_of(name), owner.age
        self.newest[name[1]] = (age, request.label) if age > newest else (newest, label)
        if age < newest:
            self.seen["older"] += 1
            if kept:
                self.seen["older and back"] += 1
                self._answer_ousted(kept, superseded(newest, label))
                self._send_away(kept)
            return superseded(newest, label)
        if age == newest or name not in self.keys:
            return None
        key, sent_away = self.keys[name], False
        for waiter in sorted(self.keys[name].queue, key=lambda waiter: waiter.number):
            of_waiter = waiter.owner.age if waiter.owner else waiter.away_age
            if 0 < of_waiter < age and waiter is not kept:
                sent_away = True
                self.seen["told and older" if waiter.is_told else "older waiter"] += 1
                self._answer_ousted(waiter, superseded(age, request.label))
                self._send_away(waiter, serves=False)
        if sent_away:
            self._serve(name)
            self.keys.setdefault(name, key)
        self._tell_listeners(name, superseded(age, request.label))
        return None

    def _answer_ousted(self, waiter: Waiter, kind: str) -> None:
        """Answer who is blocked on a position that a newer one ends."""
        if waiter.peer and self.peers[waiter.peer].waiting is waiter:
            self.answers.append(Answer(waiter.peer, kind))

    def _send_away(self, waiter: Waiter, *, serves: bool = True) -> None:
        in_line = self.is_in_line(waiter)
        if waiter in self.away:
            self.away.remove(waiter)
            if not in_line:
                key = self.keys.setdefault(waiter.name, Key(1))
                self._note_group(key, waiter.group)
                key.queue.append(waiter)
        number, peer = waiter.peer, self.peers.get(waiter.peer, Peer())
        self.keys[waiter.name].queue.remove(waiter)
        if peer.waiting is waiter:
            peer.waiting = None
        if waiter in peer.enqueued:
            peer.enqueued.remove(waiter)
        assert number or not peer.enqueued
        if serves:
            self._serve(waiter.name)

    def _tell_listeners(self, name: Name, kind: str) -> None:
        for number, peer in self.peers.items():
            if peer.listening and peer.listening.name == name:
                self.seen["listened"] += kind.startswith("superseded")
                peer.listening = None
                self.answers.append(Answer(number, kind))

    def listen(self, peer: int, request: Listen) -> None:
        name = (0, request.key)
        hold = self._by_token(name, request.token)
        newest, label = self.newest.get(request.key, (0, b""))
        if hold is None or not hold.owner or not hold.owner.age:
            self._answer(peer, "error" if hold else "error_lease_expired")
        elif newest > hold.owner.age:
            self._answer(peer, superseded(newest, label))
        else:
            self._tell_listeners(name, "error_lease_expired")
            self.peers[peer].listening = hold

    # Who asks.

    def _there(self, key: Key | None, owner: Owner | None) -> Hold | Waiter | None:
        """What the owner has there, unless the request is a later attempt than all of that."""
        there = []
        for item in [*key.holds, *key.queue] if key and owner else []:
            if item.owner and owner and item.owner.id == owner.id:
                there.append((item.owner.attempt, isinstance(item, Hold), item.number, item))
        if not there or not owner:
            return None
        attempt, _, _, latest = max(there, key=lambda row: row[:3])
        return latest if owner.attempt <= attempt else None

    def _lost(self, peer: int, key: Key | None, owner: Owner | None) -> Waiter | None:
        """Its position, if the process asks that lost the connection on which it waits."""
        there = self._there(key, owner)
        instance = self.peers[peer].instance
        if owner and isinstance(there, Waiter) and there.owner and instance:
            is_the_same = (there.instance, there.owner.attempt) == (instance, owner.attempt)
            return there if is_the_same else None
        return None

    def _conflict_with(self, peer: int, key: Key | None, owner: Owner | None) -> str | None:
        there = self._there(key, owner)
        if there is None or self._lost(peer, key, owner):
            return None
        return conflict(there)

    def _take_over(
        self, waiter: Waiter, peer: int, request: Acquire | Enqueue, *, two_phase: bool
    ) -> bool:
        has_slot = waiter.has_slot
        old = self.peers[waiter.peer]
        self._unblock(waiter, conflict(waiter))
        if waiter in old.enqueued:
            old.enqueued.remove(waiter)
        self.seen["told and taken over"] += waiter.is_told
        self.seen["taken over by who shows an old ticket"] += request.ticket == waiter.ticket
        self._note_group(self.keys[waiter.name], waiter.group)
        waiter.is_told = waiter.has_slot = False
        self._as_asked(waiter, peer, request, two_phase=two_phase)
        return has_slot

    def _unblock(self, waiter: Waiter, kind: str) -> None:
        """Answer who is blocked on a position that somebody else has now."""
        peer = self.peers.get(waiter.peer)
        if peer is not None and peer.waiting is waiter:
            peer.waiting = None
            self.seen["blocked, and taken up"] += 1
            self._answer(waiter.peer, kind)

    def _as_asked(
        self, waiter: Waiter, peer: int, request: Acquire | Enqueue, *, two_phase: bool
    ) -> None:
        """Have a position be that of a request."""
        waiter.peer, waiter.instance = peer, self.peers[peer].instance
        waiter.lease, waiter.two_phase = self._lease(request.lease), two_phase
        waiter.is_rated = request.rate is not None
        waiter.reserve = waiter.turn = None
        if isinstance(request, Acquire):
            waiter.reserve = request.reserve
        elif request.turn is not None:
            waiter.turn = request.turn / 1000

    # Waiters who are told of their turn.

    @staticmethod
    def _told(key: Key) -> int:
        return sum(waiter.is_told and waiter.has_slot for waiter in key.queue)

    def _tell(self, waiter: Waiter, turn: float) -> None:
        number = self.asking(waiter.instance)
        assert number is not None
        waiter.is_told, waiter.has_slot, waiter.told_on = True, True, number
        self._set(waiter, turn)
        self.peers[number].asks, self.peers[number].told = False, waiter
        self.seen["told"] += 1
        self.answers.append(Answer(number, "turn", waiter=waiter))

    def _pass_on(self, waiter: Waiter) -> None:
        """Give others the slot that is free for somebody."""
        if waiter.reservation is not None:
            self._end_reservation(waiter, waiter.reservation)
        else:
            waiter.has_slot, waiter.deadline = False, None
            self.seen["told in vain"] += 1
            self._serve(waiter.name)

    def _be_untold(self, waiter: Waiter) -> None:
        """Have a turn that could not be used be none."""
        self.seen["untold"] += 1
        waiter.is_told = waiter.has_slot = False
        self._note_group(self.keys[waiter.name], waiter.group)
        peer = self.peers.get(waiter.peer)
        if peer is not None and peer.waiting is waiter:
            self._set(waiter, rounded(waiter.until - self.now))
        self._look_at_groups(self.keys[waiter.name])
        self._serve(waiter.name)

    # Waiters who are away.

    def _arrival(self) -> int:
        self.arrivals += 1
        return self.arrivals

    def _end_wait(self, waiter: Waiter) -> Answer:
        """Its time is over: return what it is answered."""
        number, peer = waiter.peer, self.peers[waiter.peer]
        too_long = max(waiter.reserve or [math.inf]) > self.limits.max_lease * 1000
        if too_long or self._keeps_too_many(waiter):
            if not too_long:
                self.seen["too many positions"] += 1
            self._leave(waiter)
            return Answer(number, "timeout")
        if peer.waiting is waiter:
            peer.waiting = None
        if waiter in peer.enqueued:
            peer.enqueued.remove(waiter)
        else:
            self.seen["kept by who acquires"] += 1
        assert waiter.reserve is not None
        away, hold = waiter.reserve
        waiter.maker = number
        due = self.now + away / 1000
        waiter.reservation = ReservedPosition(due, hold / 1000, due + RESERVED_LATE)
        waiter.peer, waiter.instance = 0, b""
        waiter.two_phase, waiter.reserve = False, None
        waiter.away_age = waiter.owner.age if waiter.owner else waiter.away_age
        waiter.owner = waiter.turn = None
        self._set(waiter, rounded(waiter.reservation.until - self.now))
        self.away.append(waiter)
        self.kept += 1
        return Answer(number, "kept", waiter=waiter)

    def _keeps_too_many(self, waiter: Waiter) -> bool:
        """Whether as many positions are kept of a connection, or in a queue, as may be."""
        most = self.limits.max_holds or math.inf
        there = [each for each in self.keys[waiter.name].queue if each.reservation]
        return most <= max(len(there), sum(each.maker == waiter.peer for each in self.away))

    def _begin_holding(self, waiter: Waiter, reservation: ReservedPosition) -> bool:
        """Keep a slot free for who is expected about now."""
        if abs(reservation.due - self.now) >= reservation.hold:
            return False
        waiter.has_slot = True
        self.seen["held"] += 1
        self._set(
            waiter, rounded(min(reservation.due + reservation.hold, reservation.until) - self.now)
        )
        return True

    def _end_reservation(self, waiter: Waiter, reservation: ReservedPosition) -> None:
        was_in_line = self.is_in_line(waiter)
        if was_in_line:
            self.keys[waiter.name].queue.remove(waiter)
        if waiter.has_slot and self.now < reservation.until:
            waiter.has_slot = False
            self._set(waiter, rounded(reservation.until - self.now))
            self.seen["held in vain"] += 1
        else:
            self.away.remove(waiter)
            self.forgotten += 1
        if was_in_line:
            self._serve(waiter.name)

    def _taken_up(self, name: Name, ticket: bytes) -> Waiter | None:
        """The position that a request is for, by its ticket."""
        for waiter in [*self.away, *self.with_turns()]:
            if ticket and waiter.ticket == ticket and waiter.name == name:
                return waiter
        return None

    def _come_back(
        self, waiter: Waiter, peer: int, request: Acquire | Enqueue, *, two_phase: bool
    ) -> bool:
        """Let somebody be back in a queue: before all that came later.

        Say whether there is a slot for nobody else.
        """
        key = self.keys.setdefault(waiter.name, Key(request.limit))
        self._note_group(key, waiter.group)
        has_slot = (waiter.is_told or key.is_grouped) and waiter.has_slot
        if has_slot and not waiter.is_told:
            self.seen["back to a slot of its group"] += 1
        if waiter.reservation is None:
            self.seen["told and taken up" if waiter.is_told else "taken up before its turn"] += 1
            self._unblock(waiter, "error_not_enqueued")
            self.peers[waiter.peer].enqueued.remove(waiter)
        else:
            self.seen["back to a slot" if waiter.has_slot else "back"] += 1
            self.away.remove(waiter)
        waiter.reservation = None
        waiter.is_told = waiter.has_slot = False
        self._as_asked(waiter, peer, request, two_phase=two_phase)
        waiter.owner, waiter.label, waiter.away_age = request.owner, request.label, 0
        if waiter.turn is not None:
            waiter.is_renamed = True
        self.seen["back to a free key"] += not (key.holds or key.queue)
        queue = key.queue
        if waiter not in queue:
            self.seen["back before others"] += any(each.number > waiter.number for each in queue)
            self.seen["back behind others"] += any(each.number < waiter.number for each in queue)
            queue.append(waiter)
        queue.sort(key=lambda each: each.number)
        self._look_at_groups(key)
        return has_slot


def superseded(age: int, label: bytes) -> str:
    return f"superseded {age} by {label.decode()}"


def conflict(there: Hold | Waiter) -> str:
    assert there.owner is not None
    return f"{'held' if isinstance(there, Hold) else 'waiting'} {there.owner.attempt}"
