"""Who waits in the model: the newest alone, one for each owner, those who are told or away."""

from __future__ import annotations

from dflockd.table.queue import LEAST_TURN
from dflockd.table.reservations import RESERVED_LATE
from tests.dflockd.table.naive_state import (
    Answer,
    Hold,
    Key,
    NaiveState,
    Name,
    Peer,
    Reservation,
    Waiter,
    rounded,
)


class NaiveWaiters(NaiveState):
    """What becomes of who waits."""

    # The newest wins.

    def _newest_of(self, name: Name) -> int:
        there = self.keys.get(name, Key(1))
        ages = [item.owner[3] for item in [*there.holds, *there.queue] if item.owner]
        return self.newest.get(name[1]) or max(ages, default=0)

    def _newest_wins(self, peer: int, name: Name, kept: Waiter | None) -> str | None:
        """Send away who asks and is older than somebody, or else all who are older than that."""
        owner = self.peers[peer].owner
        if not owner or not owner[3]:
            return None
        there = self._there(peer, self.keys.get(name))
        if (
            not kept
            and there
            and not (isinstance(there, Waiter) and self._is_the_same(there, peer))
        ):
            return None  # that comes first
        if name[0] != 0:
            return "error"
        newest, age = self._newest_of(name), owner[3]
        self.newest[name[1]] = max(newest, age)
        if age < newest:
            self.seen["older"] += 1
            if kept:
                self.seen["older and back"] += 1
                self._send_away(kept)
            return f"superseded {newest}"
        if age == newest or name not in self.keys:
            return None
        for waiter in list(self.keys[name].order()):
            of_waiter = waiter.owner[3] if waiter.owner else waiter.away_age
            if 0 < of_waiter < age and waiter is not kept:
                self.seen["told and older" if waiter.is_told else "older waiter"] += 1
                if waiter.peer and self.peers[waiter.peer].waiting is waiter:
                    self.answers.append(Answer(waiter.peer, f"superseded {age}"))
                self._send_away(waiter, serves=False)
        if name in self.keys:
            self._serve(name)
        self._tell_listeners(name, f"superseded {age}")
        return None

    def _send_away(self, waiter: Waiter, *, serves: bool = True) -> None:
        if waiter.is_told:
            self._has_spoken(waiter)
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

    def listen(self, peer: int, name: Name, token: bytes) -> None:
        hold = self._by_token(name, token)
        if hold is None or not hold.owner or not hold.owner[3]:
            self._answer(peer, "error" if hold else "error_lease_expired")
        elif (newest := self.newest.get(name[1], 0)) > hold.owner[3]:
            self._answer(peer, f"superseded {newest}")
        else:
            self._tell_listeners(name, "error_lease_expired")
            self.peers[peer].listening = hold

    # Who asks.

    def _there(self, peer: int, key: Key | None) -> Hold | Waiter | None:
        """What the owner has there, unless the request is a later attempt than all of that."""
        owner = self.peers[peer].owner
        there = []
        for item in [*key.holds, *key.queue] if key and owner else []:
            if item.owner and owner and item.owner[0] == owner[0]:
                there.append((item.owner[1], isinstance(item, Hold), item.number, item))
        if not there or not owner:
            return None
        attempt, _, _, latest = max(there, key=lambda row: row[:3])
        return latest if owner[1] <= attempt else None

    def _is_the_same(self, there: Waiter, peer: int) -> bool:
        """Whether it is the same process, whose former connection is lost."""
        owner = self.peers[peer].owner
        if not owner or not there.owner:
            return False
        return owner[:3] == there.owner[:3] and bool(owner[2])

    def _conflict(self, peer: int, there: Hold | Waiter) -> None:
        assert there.owner is not None
        kind = "held" if isinstance(there, Hold) else "waiting"
        self._answer(peer, f"{kind} {there.owner[1]}")

    def _take_over(self, waiter: Waiter, peer: int, lease: int, *, two_phase: bool) -> bool:
        has_slot = waiter.has_slot
        if waiter.is_told:
            self._has_spoken(waiter)
        old = self.peers[waiter.peer]
        if old.waiting is waiter:
            old.waiting = None
            self._conflict(waiter.peer, waiter)
        if waiter in old.enqueued:
            old.enqueued.remove(waiter)
        waiter.peer, waiter.lease, waiter.two_phase = peer, lease, two_phase
        waiter.reserve = waiter.turn = None
        self.seen["told and taken over"] += waiter.is_told
        self._note_group(self.keys[waiter.name], waiter.group)
        waiter.is_told = waiter.has_slot = False
        return has_slot

    # Waiters who are told of their turn.

    @staticmethod
    def _aside(key: Key) -> int:
        return sum(waiter.is_told and waiter.has_slot for waiter in key.queue)

    def _tell(self, waiter: Waiter, turn: float) -> None:
        peer = self.peers[waiter.peer]
        waiter.is_told = waiter.has_slot = True
        waiter.reserve = None
        self._set(waiter, self._patience(waiter, turn))
        if peer.waiting is waiter:
            peer.waiting = None
            self.seen["told"] += 1
            self.answers.append(Answer(waiter.peer, "turn", waiter=waiter))

    def _patience(self, waiter: Waiter, turn: float) -> float:
        """Seconds that are left of a turn for a process that has said nothing to some of them."""
        silent = self.keys[waiter.name].silent[waiter.owner[2]] if waiter.owner else 0
        if silent:
            self.seen["told for less"] += 1
        return max(min(turn, LEAST_TURN), turn / 2**silent)

    def _has_spoken(self, waiter: Waiter) -> None:
        if waiter.owner and waiter.name in self.keys:
            del self.keys[waiter.name].silent[waiter.owner[2]]

    def _pass_on(self, waiter: Waiter) -> None:
        """Give others the slot that is free for somebody."""
        if waiter.reservation is not None:
            self._end_reservation(waiter, waiter.reservation)
        else:
            waiter.has_slot = False
            self.seen["told in vain"] += 1
            self._serve(waiter.name)

    # Waiters who are away.

    def _arrival(self) -> int:
        self.arrivals += 1
        return self.arrivals

    def _end_wait(self, waiter: Waiter) -> None:
        number, peer = waiter.peer, self.peers[waiter.peer]
        if waiter.reserve is None:
            self._leave(waiter)
            self._answer(number, "timeout")
            return
        if peer.waiting is waiter:
            peer.waiting = None
        peer.enqueued.remove(waiter)
        away, hold = waiter.reserve
        due = self.now + away / 1000
        waiter.reservation = Reservation(due, hold / 1000, due + RESERVED_LATE)
        waiter.peer, waiter.two_phase, waiter.reserve = 0, False, None
        waiter.away_age = waiter.owner[3] if waiter.owner else waiter.away_age
        waiter.owner = waiter.turn = None
        self._set(waiter, rounded(waiter.reservation.until - self.now))
        self.away.append(waiter)
        self.kept += 1
        self.answers.append(Answer(number, "kept", waiter=waiter))

    def _begin_holding(self, waiter: Waiter, reservation: Reservation) -> bool:
        """Keep a slot free for who is expected about now."""
        if abs(reservation.due - self.now) >= reservation.hold:
            return False
        waiter.has_slot = True
        self.seen["held"] += 1
        self._set(
            waiter, rounded(min(reservation.due + reservation.hold, reservation.until) - self.now)
        )
        return True

    def _end_reservation(self, waiter: Waiter, reservation: Reservation) -> None:
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

    def _taken_up(self, peer: int, name: Name) -> Waiter | None:
        """The position that this request is for, by the ticket that was said last."""
        ticket, self.peers[peer].resumes = self.peers[peer].resumes, None
        for waiter in [*self.away, *self.told()]:
            if ticket and waiter.ticket == ticket and waiter.name == name:
                return waiter
        return None

    def _come_back(
        self, waiter: Waiter, peer: int, limit: int, lease: int, *, two_phase: bool
    ) -> bool:
        """Let somebody be back in a queue: before all that came later.

        Say whether there is a slot for nobody else.
        """
        key = self.keys.setdefault(waiter.name, Key(limit))
        self._note_group(key, waiter.group)
        has_slot = (waiter.is_told or key.is_grouped) and waiter.has_slot
        if has_slot and not waiter.is_told:
            self.seen["back to a slot of its group"] += 1
        if waiter.is_told:
            self._has_spoken(waiter)
            self.seen["told and taken up"] += 1
            former = self.peers[waiter.peer].enqueued
            former.remove(waiter)
        else:
            self.seen["back to a slot" if waiter.has_slot else "back"] += 1
            self.away.remove(waiter)
        waiter.reservation = waiter.turn = None
        waiter.is_told = waiter.has_slot = False
        waiter.peer, waiter.lease, waiter.two_phase = peer, lease, two_phase
        waiter.owner, waiter.away_age = self.peers[peer].owner, 0
        self.seen["back to a free key"] += not (key.holds or key.queue)
        queue = key.queue
        if waiter not in queue:
            self.seen["back before others"] += any(each.number > waiter.number for each in queue)
            self.seen["back behind others"] += any(each.number < waiter.number for each in queue)
            queue.append(waiter)
        queue.sort(key=lambda each: each.number)
        self._look_at_groups(key)
        return has_slot
