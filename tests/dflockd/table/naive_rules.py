"""The rules of the model: who has a slot, whose turn it is, and that of groups."""

from __future__ import annotations

import math

from dflockd.wire import InGroup
from tests.dflockd.table.naive_state import (
    Answer,
    Hold,
    Key,
    NaiveState,
    Name,
    Waiter,
    name_of,
)


class NaiveRules(NaiveState):
    """What follows from an event."""

    def _answer(
        self, peer: int, kind: str, hold: Hold | None = None, lease: int | None = None
    ) -> None:
        self.answers.append(Answer(peer, kind, hold, lease))

    def _reply(
        self, peer: int, kind: str, hold: Hold | None = None, lease: int | None = None
    ) -> None:
        """Answer the request that is handled, before all that it has brought."""
        self.answers.insert(self.first, Answer(peer, kind, hold, lease))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _set(self, what: Hold | Waiter, span: float) -> None:
        what.deadline, what.span, what.since = self.now + span, span, self._tick()

    def _block(self, waiter: Waiter, timeout: int) -> None:
        peer = self.peers[waiter.peer]
        peer.waiting, peer.granted = waiter, None
        self._set(waiter, timeout)

    def _lease(self, lease: int | None) -> int:
        return self.limits.default_lease if lease is None else lease

    def _refusal(self, name: Name, limit: int, lease: int | None) -> str | None:
        if self._lease(lease) > self.limits.max_lease:
            return "error"
        if self.now < self.recovers_until:
            return self._recovering()
        if name not in self.keys:
            return "error_max_locks" if len(self.keys) >= self.limits.max_locks else None
        self.keys[name].limit = self.keys[name].limit or limit
        return None if self.keys[name].limit == limit else "error_limit_mismatch"

    def _recovering(self) -> str:
        return f"recovering {math.ceil((self.recovers_until - self.now) * 1000)}"

    def _too_many(
        self, peer: int, key: Key | None, limit: int, kept: Waiter | None, *, two_phase: bool
    ) -> bool:
        if self._has_too_much(peer, two_phase=two_phase):
            return True
        if limit <= self._most or key is None:
            return False
        return len(key.holds) + (0 if kept else self._aside(key)) >= self._most

    def _has_too_much(self, peer: int, *, two_phase: bool) -> bool:
        owned = sum(hold.peer == peer for hold in self.holds())
        enqueued = len(self.peers[peer].enqueued) if two_phase else 0
        return max(owned, enqueued) >= self._most

    @property
    def _most(self) -> float:
        return self.limits.max_holds or math.inf

    def _full(self, key: Key) -> bool:
        there = [waiter for waiter in key.queue if waiter.reservation is None]
        return 0 < self.limits.max_waiters <= len(there)

    def _waiter(self, peer: int, name: Name) -> Waiter | None:
        for waiter in self.peers[peer].enqueued:
            if waiter.name == name:
                return waiter
        return None

    def _by_token(self, name: Name, token: bytes) -> Hold | None:
        for hold in self.holds():
            if hold.name == name and hold.token == token:
                return hold
        return None

    def _fence(self, hold: Hold) -> int | None:
        return self.authentic(hold.name, hold.token) if hold.token else None

    def _forgotten(self, name: Name, token: bytes) -> int | None:
        if self.now >= self.recovers_until or (name, token) in self.ended:
            return None
        fence = self.authentic(name, token)
        if fence is not None and name[0] == 0:
            later = [self.authentic(*each) or 0 for each in self.ended if each[0] == name]
            if fence < max(later, default=0):
                return None  # it had ended before that one was granted
        return fence

    def _brought_back(self, peer: int, name: Name, token: bytes) -> Hold | None:
        fence = self._forgotten(name, token)
        if fence is None:
            return None
        is_lock = name[0] == 0
        if is_lock and name in self.keys:
            if any((self._fence(other) or 0) > fence for other in self.keys[name].holds):
                return None
            self._end_earlier(name, fence)
        hold = Hold(name, 0, None, 0, 0, 0, 0, token, self.peers[peer].owner)
        self.keys.setdefault(name, Key(1 if is_lock else 0)).holds.append(hold)
        return hold

    def _end_earlier(self, name: Name, fence: int) -> None:
        """End what is here of a lock that was granted again later."""
        if name[0] == 0 and name in self.keys:
            for other in list(self.keys[name].holds):
                if (self._fence(other) or 0) < fence:
                    self._end(other)

    def _grant(self, name: Name, peer: int, lease: int, group: InGroup | None) -> Hold:
        self.grants += 1
        self.seen["granted beside a slot"] += any(p.has_slot for p in self.keys[name].queue)
        now = self._tick()
        hold = Hold(name, self.grants, peer, now, self.now + lease, lease, now)
        hold.owner = self.peers[peer].owner
        self._note_group(self.keys[name], group)
        hold.group = name_of(group)
        self.keys[name].holds.append(hold)
        if name in self.rates:
            assert self.rates[name].free(self.now) > 0
            self.rates[name].pending.append(hold)
        return hold

    def _leave(self, waiter: Waiter) -> None:
        peer = self.peers[waiter.peer]
        self.keys[waiter.name].queue.remove(waiter)
        self._look_at_groups(self.keys[waiter.name])
        if peer.waiting is waiter:
            peer.waiting = None
        if waiter in peer.enqueued:
            peer.enqueued.remove(waiter)
        key = self.keys[waiter.name]
        if not key.holds and not key.queue:
            del self.keys[waiter.name]

    def _end(self, hold: Hold, *, has_begun: bool = True) -> None:
        """A hold ends; for all that is known its run may have begun until now."""
        key = self.keys[hold.name]
        key.holds.remove(hold)
        if hold.name in self.rates:
            rate = self.rates[hold.name]
            if has_begun and hold.token:
                rate.begin(hold, self.now)
            elif hold in rate.pending:
                rate.pending.remove(hold)
        if hold.token:
            self.ended.add((hold.name, hold.token))
        if hold.name[0] == 0:
            self._tell_listeners(hold.name, "error_lease_expired")
        for peer in self.peers.values():
            peer.enqueued = [waiter for waiter in peer.enqueued if waiter.hold is not hold]
        self._serve(hold.name)

    def _serve(self, name: Name) -> None:
        """Go through the queue once, and give each the slot that is left for it, if any."""
        key = self.keys[name]
        if key.is_grouped:
            self._serve_groups(name, key)
            return
        told = [waiter for waiter in key.queue if waiter.is_told]
        free = self._open(name, key, min(key.limit, self._most)) - self._aside(key)
        for waiter in list(key.queue):
            if free <= 0:
                break
            if waiter in told:
                continue
            if waiter.reservation is None and waiter.turn is not None:
                self._tell(waiter, waiter.turn)
                free -= 1
            elif waiter.reservation is None:
                key.queue.remove(waiter)
                self._give(waiter)
                free -= 1
            elif waiter.has_slot or self._begin_holding(waiter, waiter.reservation):
                free -= 1
            else:
                key.queue.remove(waiter)
                self.seen["passed"] += 1
        if not key.holds and not key.queue:
            del self.keys[name]

    def _go_on_with(self, waiter: Waiter, has_slot: bool) -> None:
        """Serve who is back, and had a slot for nobody else."""
        key = self.keys[waiter.name]
        most = min(key.limit, self._most)
        if has_slot and self._open(waiter.name, key, most) > self._aside(key):
            self.seen["back before who waits"] += waiter is not key.queue[0]
            if waiter.turn is not None:
                self._tell(waiter, waiter.turn)
            else:
                key.queue.remove(waiter)
                self._give(waiter)
        self._serve(waiter.name)

    def _give(self, waiter: Waiter) -> None:
        peer = self.peers[waiter.peer]
        granted = self._grant(waiter.name, waiter.peer, waiter.lease, waiter.group)
        granted.owner = waiter.owner
        if peer.waiting is waiter:
            peer.waiting, peer.granted = None, granted
            if waiter in peer.enqueued:
                peer.enqueued.remove(waiter)
            self._answer(waiter.peer, "granted", granted, waiter.lease)
        else:
            waiter.hold = granted

    # Groups.

    def _serve_groups(self, name: Name, key: Key) -> None:
        """Give turn after turn to the group that has waited for one longest."""
        while True:
            self._look_at_groups(key)
            aside = sum(waiter.has_slot for waiter in key.queue)
            if self._open(name, key, min(key.limit, self._most)) <= aside or not key.turns:
                break
            group = min(key.turns, key=key.turns.__getitem__)
            waiter = next(each for each in key.of_group(group) if each.wants)
            if len(key.turns) > 1:
                self.seen["turns of several groups"] += 1
            if waiter.reservation is not None:
                if self._begin_holding(waiter, waiter.reservation):
                    key.turns[group] = self._tick()
                else:
                    key.queue.remove(waiter)
                    self.seen["passed"] += 1
                continue
            key.turns[group] = self._tick()
            if waiter.turn is not None:
                self._tell(waiter, waiter.turn)
            else:
                key.queue.remove(waiter)
                self._give(waiter)
        if not key.holds and not key.queue:
            del self.keys[name]

    def _look_at_groups(self, key: Key) -> None:
        """Note which groups may have a turn now, and since when."""
        waiting = dict.fromkeys(name_of(each.group) for each in key.queue if each.wants)
        for name in list(key.limits):
            if name not in waiting and not key.taken(name):
                del key.limits[name]
        ready = [name for name in waiting if key.has_room(name)]
        if len(waiting) > len(ready):
            self.seen["groups that have all they may"] += 1
        key.turns = {name: since for name, since in key.turns.items() if name in ready}
        for name in ready:
            if name not in key.turns:
                key.turns[name] = self._tick()

    def _note_group(self, key: Key, group: InGroup | None) -> None:
        """Take in that somebody of a group has come who is to have a slot or a position."""
        if group is not None:
            key.is_grouped = True
            key.limits.setdefault(group.name, group.limit)

    def _join(self, key: Key, waiter: Waiter) -> None:
        self._note_group(key, waiter.group)
        key.queue.append(waiter)
        self._look_at_groups(key)

    def _has_room_for(self, name: Name, group: InGroup | None) -> bool:
        """Whether a newcomer may have a slot; the latest word on its group counts from now on."""
        key = self.keys.get(name)
        if key is not None and group and (key.taken(group.name) or key.of_group(group.name)):
            key.limits[group.name] = group.limit
            before = key.taken(group.name)
            self._serve(name)
            if key.taken(group.name) > before:
                self.seen["served by a new limit"] += 1
        if key is None:
            return name not in self.rates or self.rates[name].free(self.now) > 0
        if name in self.rates and any(
            each.wants for each in key.queue if self._may_have(key, each)
        ):
            return False  # a place may be free, and is about to be theirs
        aside = sum(waiter.has_slot for waiter in key.queue)
        return self._open(name, key, key.limit) > aside and key.has_room(name_of(group))

    @staticmethod
    def _may_have(key: Key, waiter: Waiter) -> bool:
        return not key.is_grouped or key.has_room(name_of(waiter.group))

    def _open(self, name: Name, key: Key, most: float) -> float:
        """Slots that nobody has, so far as there are places for them: of those some are held."""
        slots = most - len(key.holds)
        if name not in self.rates:
            return slots
        places = self.rates[name].free(self.now)
        self.seen["slots, and no place"] += places <= 0 < slots and bool(key.queue)
        return min(slots, places)
