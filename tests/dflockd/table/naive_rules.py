"""The rules of the model: who has a slot, whose turn it is, and that of groups."""

from __future__ import annotations

import math

from dflockd.wire import Acquire, Enqueue, FairGroup, Owner, Renew
from tests.dflockd.table.naive_state import (
    Answer,
    Hold,
    Key,
    NaiveState,
    Name,
    Pause,
    PlacesOfRate,
    Waiter,
    name_of,
    weight_of,
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

    def _set(self, what: Hold | Waiter | Pause, span: float) -> None:
        what.deadline, what.span, what.since = self.now + span, span, self._tick()

    def _block(self, waiter: Waiter, timeout: int) -> None:
        peer = self.peers[waiter.peer]
        peer.waiting, peer.granted = waiter, None
        waiter.until = self.now + timeout
        if not waiter.is_told:
            self._set(waiter, timeout)

    def _lease(self, lease: int | None) -> int:
        return self.limits.default_lease if lease is None else lease

    def _is_malformed(self, request: Acquire | Enqueue) -> bool:
        """Whether a request is nothing but an error, and says nothing of the key."""
        if self._lease(request.lease) > self.limits.max_lease:
            return True
        if request.owner and request.owner.age and request.limit != 1:
            return True
        if isinstance(request, Enqueue):
            return (request.turn or 0) > self.limits.max_lease * 1000
        return False

    def _refusal(self, name: Name, request: Acquire | Enqueue) -> str | None:
        """Say why somebody may not even ask; if they may, the limit is as they say."""
        if self.now < self.recovers_until:
            return self._recovering()
        key = self.keys.get(name)
        if key is None and len(self.keys) >= self.limits.max_locks:
            return "error_max_locks"
        answer = self._refusal_of_rate(name, request)
        if answer or key is None:
            return answer
        before, limit = key.limit, request.limit
        if name[0] == 1 and before not in (0, limit):
            return "error_limit_mismatch"
        key.limit = limit
        if limit > before > 0:
            free = min(limit, self._most) - len(key.holds)
            waiting = [each for each in key.queue if each.wants and not each.reservation]
            self.seen["raised for a waiter"] += bool(waiting) and free > 0
            self._serve(name)
            self.keys.setdefault(name, key)
        elif limit < before:
            self.seen["lowered below the holders"] += len(key.holds) > limit
        return None

    def _refusal_of_rate(self, name: Name, request: Acquire | Enqueue) -> str | None:
        """Say why a rate may not be, if it may not: all runs of all rates have a bound."""
        if request.rate is None:
            return None
        runs, limits = {each: rate.runs for each, rate in self.rates.items()}, self.limits
        is_more = request.rate.runs > runs.get(name, 0)
        runs[name] = request.rate.runs
        answer = None
        if request.rate.window > limits.max_rate_window * 1000:
            answer = "error_rate_window"
        elif is_more and sum(runs.values()) > limits.max_rate_runs:
            answer = "error_max_rates"
        if answer and name in self.keys:
            self.seen["a rate that is refused"] += 1
            is_newer = request.owner and request.owner.age > self._newest_of(name)[0]
            self.seen["refused before it is the newest"] += bool(is_newer)
            self.seen["refused before its limit"] += request.limit != self.keys[name].limit
        return answer

    def _name_rate(self, name: Name, request: Acquire | Enqueue) -> None:
        if request.rate is not None:
            runs, window = request.rate.runs, request.rate.window / 1000
            rate = self.rates.setdefault(name, PlacesOfRate(runs, window))
            rate.closed_until = self.rates_since
            self.seen["another rate"] += (runs, window) != (rate.runs, rate.window)
            rate.change(runs, window, self.now)

    def _recovering(self) -> str:
        return f"recovering {math.ceil((self.recovers_until - self.now) * 1000)}"

    def _is_used_up(self, key: Key | None, limit: int, kept: Waiter | None) -> bool:
        """Whether a key whose limit is beyond all that it may ever have has that many holders."""
        if limit <= self._most or key is None:
            return False
        return len(key.holds) + (0 if kept else self._told(key)) >= self._most

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
        """The fence of what may come back: nobody has ended it, or what began after its end."""
        if self.now >= self.recovers_until or (name, token) in self.ended:
            return None
        fence = self.authentic(name, token)
        later = [
            self.authentic(*each) or 0
            for each in self.ended
            if each[0] == name and self.was_alone(*each)
        ]
        return None if fence is None or fence < max(later, default=0) else fence

    def _brought_back(self, peer: int, name: Name, request: Renew) -> Hold | None:
        token = request.token
        fence = self._forgotten(name, token)
        if fence is None:
            return None
        alone = self.was_alone(name, token)
        for other in self.keys[name].holds if name in self.keys else ():
            if other.limit == 1 and (self._fence(other) or 0) > fence:
                return None
        if alone:
            self._end_earlier(name, fence)
        self.seen["back, of several" if not alone else "back alone"] += 1
        limit = 1 if alone else 0
        key = self.keys.setdefault(name, Key(limit))
        hold = Hold(name, 0, None, 0, 0, 0, 0, limit, token, request.label, request.owner)
        self._note_group(key, request.group)
        hold.group, hold.weight = name_of(request.group), weight_of(request.group)
        key.holds.append(hold)
        return hold

    def _end_earlier(self, name: Name, fence: int) -> None:
        """End what is here of a key that was granted to one alone later."""
        if name in self.keys:
            for other in list(self.keys[name].holds):
                if (self._fence(other) or 0) < fence:
                    self._end(other)

    def _grant(
        self,
        name: Name,
        peer: int,
        lease: int,
        owner: Owner | None,
        label: bytes,
        group: FairGroup | None,
        *,
        is_rated: bool,
    ) -> Hold:
        key = self.keys[name]
        assert key.fits(weight_of(group), key.aside())
        assert not key.pause
        self.seen["granted beside a slot"] += any(p.has_slot for p in key.queue)
        now = self._tick()
        number, deadline = self.grants + 1, self.now + lease
        hold = Hold(name, number, peer, now, deadline, lease, now, key.limit)
        self.granted.append(hold)
        hold.owner, hold.label = owner, label
        self._note_group(key, group)
        hold.group, hold.weight = name_of(group), weight_of(group)
        self.seen["a weight that is granted"] += hold.weight > 1
        key.holds.append(hold)
        if is_rated:
            places = min(hold.weight, self.rates[name].runs)
            assert self.rates[name].free(self.now) >= places
            self.rates[name].pending[hold] = places
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
        if not key.is_used:
            del self.keys[waiter.name]

    def _end(self, hold: Hold, *, has_begun: bool = True) -> None:
        """A hold ends; for all that is known its run may have begun until now."""
        key = self.keys[hold.name]
        key.holds.remove(hold)
        if hold.name in self.rates:
            rate = self.rates[hold.name]
            if has_begun and hold.token:
                rate.begin(hold, self.now)
            else:
                rate.pending.pop(hold, None)
        if hold.token:
            self.ended.add((hold.name, hold.token))
        if hold.name[0] == 0:
            self._tell_listeners(hold.name, "error_lease_expired")
        self._forget_enqueue(hold)
        self._serve(hold.name)

    def _forget_enqueue(self, hold: Hold) -> None:
        """No peer that enqueued has it any more."""
        for peer in self.peers.values():
            peer.enqueued = [waiter for waiter in peer.enqueued if waiter.hold is not hold]

    def _serve(self, name: Name) -> None:
        """Go through the queue once, and give each the slot that is left for it, if any."""
        key = self.keys[name]
        if key.pause:
            self.seen["waits for the end of a pause"] += any(each.wants for each in key.queue)
            self._look_at_groups(key)  # each event of a step can be what makes a group ready
            return
        if key.is_grouped:
            self._serve_groups(name, key)
            return
        before = 0  # slots for those who are ahead, and expected
        for waiter in list(key.queue):
            open_ = min(key.limit, self._most) - len(key.holds)
            if open_ - self._told(key) <= before:
                break
            if waiter.is_told or not self.can_start(waiter):
                continue
            if not waiter.has_slot and not self._may_begin(waiter):
                self.seen["slots, and no place"] += 1
                continue
            if waiter.reservation is None and waiter.turn is not None:
                self._tell(waiter, waiter.turn)
            elif waiter.reservation is None:
                key.queue.remove(waiter)
                self._give(waiter)
            elif waiter.has_slot or self._begin_holding(waiter, waiter.reservation):
                before += 1
            else:
                key.queue.remove(waiter)
                self.seen["passed"] += 1
        self._starve(name, key)
        if not key.is_used:
            del self.keys[name]

    def _starve(self, name: Name, key: Key) -> None:
        """Note which processes do not ask while there is a slot for somebody."""
        plain = any(
            each.wants and not each.is_rated and self._may_have(key, each, plain=True)
            for each in key.queue
        )
        is_open = min(key.limit, self._most) - len(key.holds) > self._told(key)
        is_open = is_open and key.fits(1, key.aside())
        is_open = is_open and (self._places(name) > 0 or plain)
        wanting = {each.instance for each in key.queue if each.turn is not None and each.wants}
        for instance in wanting:
            if is_open and self.asking(instance) is None:
                self.starved.setdefault(instance, {})[name] = None
        self._forget_starved()

    def _forget_starved(self) -> None:
        for instance, names in self.starved.items():
            for name in list(names):
                queue = self.keys[name].queue if name in self.keys else []
                mine = [w for w in queue if w.instance == instance and w.turn is not None]
                if not any(waiter.wants for waiter in mine):
                    del names[name]

    def _go_on_with(self, waiter: Waiter, has_slot: bool) -> None:
        """Serve who is back, and had a slot for nobody else."""
        key = self.keys[waiter.name]
        most = min(key.limit, self._most)
        if has_slot and key.pause:
            self.seen["back to a paused key"] += 1
        has_slot = has_slot and self._has_places(waiter) and self.can_start(waiter)
        has_slot = has_slot and most - len(key.holds) > self._told(key) and not key.pause
        if waiter.weight > 1:
            has_slot = has_slot and key.has_room(name_of(waiter.group), waiter.weight)
        if has_slot and key.fits(waiter.weight, key.aside()):
            self.seen["back before who waits"] += waiter is not key.queue[0]
            if waiter.turn is not None:
                self._tell(waiter, waiter.turn)
            else:
                key.queue.remove(waiter)
                self._give(waiter)
        self._serve(waiter.name)

    def _give(self, waiter: Waiter) -> None:
        peer = self.peers[waiter.peer]
        granted = self._grant(
            *(waiter.name, waiter.peer, waiter.lease, waiter.owner, waiter.label, waiter.group),
            is_rated=waiter.is_rated,
        )
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
            found = self.whose_turn(name, key)
            if found is None:
                break
            group, waiter = found
            is_back = waiter.reservation is None
            if is_back and not key.has_room(group, waiter.weight):
                self.seen["more than its group may have"] += 1
                key.plain_stuck[group], key.stuck_by[group] = key.state_of(group), waiter
                if self._next_of_groups({group: 0}, key, has_place=True) == found:
                    key.stuck[group] = key.state_of(group)
                continue
            if not key.fits(waiter.weight if is_back else 1, key.aside() + key.expected()):
                self.seen["waits for more slots"] += waiter.weight > 1
                break
            self.seen["turns of several groups"] += len(key.turns) > 1
            if waiter.reservation is not None:
                if self._begin_holding(waiter, waiter.reservation):
                    self._use_turn(key, group)
                else:
                    key.queue.remove(waiter)
                    self.seen["passed"] += 1
                continue
            self._use_turn(key, group)
            if waiter.turn is not None:
                self._tell(waiter, waiter.turn)
            else:
                key.queue.remove(waiter)
                self._give(waiter)
        self._starve(name, key)
        if not key.is_used:
            del self.keys[name]

    def whose_turn(
        self, name: Name, key: Key, most: float | None = None
    ) -> tuple[bytes, Waiter] | None:
        """Who is the next if it fits, and its group; of so many holders at most."""
        aside = sum(waiter.has_slot for waiter in key.queue)
        has_place = self._places(name) > 0
        turns = key.turns if has_place else key.plain_turns
        most = self._most if most is None else most
        if min(key.limit, most) - len(key.holds) <= aside or not turns:
            return None
        found = self._next_of_groups(turns, key, has_place=has_place)
        if found is not None and not self._has_places(found[1]):
            self.seen["waits for more places"] += 1
            found = self._next_of_groups(key.plain_turns, key, has_place=False)
        return found

    def go_on_behind(self, groups: list[tuple[Name, bytes]]) -> None:
        """Look again at groups that a process asks for again, or behind which others have waited."""
        for name, group in groups:
            before = len(self.answers)
            if self.keys[name].let_in(group):
                self.seen["a group let in again"] += 1
                self._look_at_groups(self.keys[name])
            self._serve(name)
            self.seen["gone on behind who asks no more"] += len(self.answers) > before

    def _next_of_groups(
        self, turns: dict[bytes, int], key: Key, *, has_place: bool
    ) -> tuple[bytes, Waiter] | None:
        """Whose turn it is among those who can start, and its group; of those who need no place."""
        in_order = sorted(turns, key=turns.__getitem__)
        for group in in_order:
            for each in key.of_group(group):
                if each.wants and self.can_start(each) and (has_place or not each.is_rated):
                    self.seen["a group passed over"] += group != in_order[0]
                    return group, each
        return None

    def _look_at_groups(self, key: Key) -> None:
        """Note which groups may have a turn now, and since when."""
        waiting = dict.fromkeys(name_of(each.group) for each in key.queue if each.wants)
        for name in list(key.limits):
            if name not in waiting and not key.taken(name):
                del key.limits[name]
        for name in [name for name, was in key.plain_stuck.items() if was != key.state_of(name)]:
            key.let_in(name)
        ready = [name for name in waiting if key.may_have_turns(name)]
        if len(waiting) > len(ready):
            self.seen["groups that have all they may"] += 1
        plain = {name_of(each.group) for each in key.queue if each.wants and not each.is_rated}
        for turns, may in (
            (key.turns, ready),
            (
                key.plain_turns,
                [
                    name
                    for name in waiting
                    if name in plain and key.may_have_turns(name, is_plain=True)
                ],
            ),
        ):
            for name in [name for name in turns if name not in may]:
                del turns[name]
            for name in may:
                turns.setdefault(name, self._tick())

    def _use_turn(self, key: Key, group: bytes) -> None:
        """Have a group be the last."""
        now = self._tick()
        for turns in (key.turns, key.plain_turns):
            if group in turns:
                turns[group] = now

    def _note_group(self, key: Key, group: FairGroup | None) -> None:
        """Take in that somebody of a group has come who is to have a slot or a position."""
        if group is not None:
            key.is_grouped = True
            key.limits.setdefault(group.name, group.limit)

    def _join(self, key: Key, waiter: Waiter) -> None:
        self._note_group(key, waiter.group)
        key.queue.append(waiter)
        self._look_at_groups(key)

    def _has_room_for(self, name: Name, group: FairGroup | None, *, is_rated: bool) -> bool:
        """Whether a newcomer may have a slot; the latest word on its group counts from now on."""
        key = self.keys.get(name)
        if key is not None and group and (key.taken(group.name) or key.of_group(group.name)):
            had_room, before = key.may_have_turns(group.name), key.taken(group.name)
            is_there = group.name in key.limits or key.taken(group.name) > 0
            is_new = is_there and key.limits.get(group.name) != group.limit
            key.limits[group.name] = group.limit
            if is_new:
                key.let_in(group.name)
            waits = any(each.wants for each in key.of_group(group.name))
            has_room = key.may_have_turns(group.name)
            may_serve = (is_new and key.is_heavy()) or (waits and has_room and not had_room)
            if may_serve:
                self._serve(name)
                self.keys.setdefault(name, key)  # though nobody else is left
            self.seen["served by a new limit"] += key.taken(group.name) > before
        if key is None:
            return not is_rated or self.rates[name].free(self.now) >= min(
                weight_of(group), self.rates[name].runs
            )
        if key.pause:
            return False
        plain, rated = self.ahead(key)
        weight = weight_of(group)
        if is_rated and (rated or self._places(name) < min(weight, self.rates[name].runs)):
            return False  # a place may be free, and is about to be theirs
        if key.is_heavy() and self.whose_turn(name, key, math.inf) is not None:
            return False  # nobody passes who waits for several slots
        ahead = 0 if key.is_heavy() else plain
        has_room = key.fits(weight, key.aside() + key.expected() + ahead)
        if has_room and rated:
            self.seen["past who waits for a place"] += 1
        return has_room and key.has_room(name_of(group), weight) and name_of(group) not in key.stuck

    def ahead(self, key: Key) -> tuple[int, int]:
        """How many go before a newcomer who needs no place of the rate, and how many others do.

        Of those who want to be told one for each process that asks.
        """
        start = [each for each in key.queue if each.wants and self.can_start(each)]
        plain = {
            who(each)
            for each in start
            if not each.is_rated and self._may_have(key, each, plain=True)
        }
        others = {
            who(each)
            for each in start
            if (each.is_rated or each.turn is not None) and self._may_have(key, each)
        }
        return len(plain), len(others - plain)

    @staticmethod
    def _may_have(key: Key, waiter: Waiter, *, plain: bool = False) -> bool:
        return not key.is_grouped or key.may_have_turns(name_of(waiter.group), is_plain=plain)

    def _may_begin(self, waiter: Waiter) -> bool:
        """Whether the rate has a place for it; of several it needs, one is enough to have its turn."""
        return not waiter.is_rated or self._places(waiter.name) > 0

    def _has_places(self, waiter: Waiter) -> bool:
        """Whether the rate has all places that it needs."""
        if not waiter.is_rated:
            return True
        return self._places(waiter.name) >= self.rates[waiter.name].need(waiter)

    def _places(self, name: Name) -> float:
        """Places of a rate that are neither taken nor held with a slot."""
        if name not in self.rates:
            return math.inf
        queue = self.keys[name].queue
        held = sum(each.weight for each in queue if each.has_slot and each.is_rated)
        return self.rates[name].free(self.now) - held


def who(waiter: Waiter) -> object:
    """Who it is for the others in line: of a process only one has a turn at once."""
    return waiter.instance if waiter.turn is not None else waiter.number
