"""Random histories of weights, groups, rates, turns and shards: who could go on does.

There is no model. After each step all that the table counts is counted anew, and whoever waits is
looked at: either they cannot be granted, or somebody before them waits for slots or for places.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from dflockd.table import Effect, Entry, Limits, LockTable, Peer, ShardTable, TokenIssuer, Waiter
from dflockd.table.grouped import GroupedQueue
from dflockd.table.limits import STEP
from dflockd.table.states import EXPECTED, PASSED
from dflockd.wire import (
    ALL,
    Acquire,
    Enqueue,
    Enqueued,
    FairGroup,
    Granted,
    Hello,
    How,
    Moved,
    Next,
    Pass,
    Pause,
    Queued,
    Rate,
    Release,
    Renew,
    Request,
    Reserve,
    Resume,
    Space,
    TimedOut,
    Unbegun,
    Wait,
    YourTurn,
)
from tests.dflockd.table.recount import check_counts
from tests.dflockd.table.sharded_support import AWAY, table_of

LOCK = Space.LOCK
KEYS = (b"0", b"1")
"""One of each shard."""
LATE = 0.001
"""Seconds by which a place may be given after it is free."""


class Others:
    """A look at a key, without what the table notes of it: who could have a slot now."""

    def __init__(self, entry: Entry, most: int, now: float) -> None:
        queue = entry.waiters
        assert queue is not None
        self.entry, self.queue = entry, queue
        there = list(queue)
        self.line = [w for w in there if w.state not in (EXPECTED, PASSED) and w.can_start]
        self.line.sort(key=lambda waiter: waiter.number)
        aside = [waiter for waiter in there if waiter.state == EXPECTED]
        self.free = entry.limit - entry.used - sum(waiter.weight for waiter in aside)
        self.is_open = most > len(entry.holds) + len(aside)
        self.places: float = ALL
        if queue.rate is not None:
            self.places = queue.rate.free(now) - sum(w.weight for w in aside if w.is_rated)
        self.taken: Counter[bytes] = Counter()
        for waiter in aside:
            self.taken[name_of(waiter)] += waiter.weight
        for hold in entry.holds.values():
            self.taken[hold.group] += hold.weight

    def needs(self, waiter: Waiter) -> int:
        """How many slots: somebody who is away holds what there is, or is passed."""
        return 1 if waiter.is_away else min(waiter.weight, self.entry.limit)

    def has_places(self, waiter: Waiter) -> bool:
        if not waiter.is_rated or self.queue.rate is None:
            return True
        most = self.queue.rate.runs
        return self.places >= (1 if waiter.is_away else min(waiter.weight, most))

    def its_group_may(self, waiter: Waiter) -> bool:
        if waiter.group is None or not isinstance(self.queue, GroupedQueue):
            return True
        limit = self.queue.limit_of(waiter.group)
        needs = 1 if waiter.is_away else min(waiter.weight, limit)
        return limit <= 0 or self.taken[waiter.group.name] + needs <= limit

    def waits_for_slots(self, waiter: Waiter) -> bool:
        """Whether slots are all that it lacks: then nobody passes it."""
        needs = self.needs(waiter)
        return self.has_places(waiter) and self.its_group_may(waiter) and self.free < needs

    def could_go_on(self) -> Iterator[Waiter]:
        """Who has all they need, and waits behind nobody."""
        if not self.is_open or any(self.waits_for_slots(waiter) for waiter in self.line):
            return
        for at, waiter in enumerate(self.line):
            before = [w for w in self.line[:at] if name_of(w) == name_of(waiter)]
            if not all(self.its_group_may(w) for w in before):
                continue  # a group is left out whose first may not have all that it needs
            others = [w for w in self.line if w.is_rated and w is not waiter]
            if waiter.is_rated and not all(self.has_places(w) for w in others):
                continue  # the first who needs places has all of them before others have one
            fits = self.needs(waiter) <= self.free
            if fits and self.has_places(waiter) and self.its_group_may(waiter):
                yield waiter

    def is_passed_by_newcomers(self) -> bool:
        """Whether not to pass somebody would be wrong, of a key without groups: nobody waits for slots.

        Or those who do stand behind somebody who waits for places.
        """
        for waiter in self.line:
            if self.waits_for_slots(waiter):
                return False
            if not self.has_places(waiter):
                self.line = [each for each in self.line if not each.is_rated]
                return self.is_passed_by_newcomers()
        return True


def name_of(waiter: Waiter) -> bytes:
    return b"" if waiter.group is None else waiter.group.name


class History:
    """Some connections about two keys; the shards of these, if there are any, go to and fro."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.now, self.epoch = 0.0, 2
        self.seen: Counter[str] = Counter()
        self.tables: list[LockTable]
        most = dice.choice([0, 0, 0, 3])
        if seed % 2:
            self.tables = [table_of(1e9, 0, 1, max_holds=most), table_of(1e9, 7, max_holds=most)]
        else:
            self.tables = [LockTable(Limits(max_holds=most), TokenIssuer(b"secret", 0), kept=True)]
        self.peers: dict[tuple[int, int], Peer] = {}
        self.tokens: list[tuple[bytes, bytes]] = []
        self.tickets: list[tuple[bytes, bytes]] = []
        self.turns: list[tuple[bytes, bytes]] = []
        self.limits = {key: dice.choice([1, 3, 3, 5, 8]) for key in KEYS}
        self.rate = dice.choice([None, Rate(1, 1500), Rate(3, 1500), Rate(5, 900)])
        self.changes = dice.random() < 0.4
        self.in_groups = dice.random() < 0.6

    # What is asked.

    def said(self) -> dict[str, Any]:
        dice = self.dice
        group = None
        if self.in_groups and dice.random() < 0.7:
            limits = [0, 1, 2, 3] if self.changes else [3]
            group = FairGroup(dice.choice([b"a", b"a", b"b"]), dice.choice(limits))
        if dice.random() < 0.4:
            group = (group or FairGroup(b""))._replace(weight=dice.choice([2, 3, 4, ALL]))
        rate = self.rate if dice.random() < 0.6 else None
        if rate is not None and self.changes and dice.random() < 0.1:
            rate = rate._replace(runs=dice.choice([1, 2, 6]))
        return {"group": group, "rate": rate}

    def what(self) -> tuple[Space, bytes, int]:
        key = self.dice.choice(KEYS)
        limit = self.limits[key]
        if self.changes and self.dice.random() < 0.1:
            limit = self.dice.choice([1, 2, 9])
        return LOCK, key, limit

    def table_with(self, key: bytes) -> int:
        """Which table has the shard of a key."""
        for at, table in enumerate(self.tables):
            if not isinstance(table, ShardTable) or int(key) in table.partitions:
                return at
        raise AssertionError(key)

    def idle(self, key: bytes, *, enqueued: bool = False) -> tuple[int, Peer] | None:
        at = self.table_with(key)
        ready = [
            peer
            for (table, _), peer in self.peers.items()
            if table == at and peer.waiting is None and (not enqueued or (0, key) in peer.enqueued)
        ]
        if ready and (enqueued or len(ready) > 3 or self.dice.random() < 0.6):
            return at, self.dice.choice(ready)
        if enqueued:
            return None
        peer = self.tables[at].connect()
        self.tables[at].greet(peer, Hello(self.dice.choice([b"here", b"here", b"there"]), b"1"))
        self.peers[at, peer.id] = peer
        return at, peer

    def ask(self, key: bytes, request: Request, *, enqueued: bool = False) -> object:
        found = self.idle(key, enqueued=enqueued)
        if found is None:
            return None
        at, peer = found
        effects = self.tables[at].handle(peer, request, self.now)
        self.heed(effects, key)
        return next((reply for number, reply in effects if number == peer.id), None)

    def heed(self, effects: list[Effect], key: bytes = b"") -> None:
        for _, reply in effects:
            self.seen[type(reply).__name__] += 1
            if isinstance(reply, Granted | Enqueued):
                self.tokens.append((self.key_of(reply.token), reply.token))
            elif isinstance(reply, TimedOut | Queued | Moved | YourTurn) and reply.ticket:
                named = self.key_of_ticket(reply.ticket) or key
                self.tickets.append((named, reply.ticket))

    def key_of(self, token: bytes) -> bytes:
        for table in self.tables:
            for partition in table.each_partition():
                for key, entry in partition.spaces[LOCK].items():
                    if any(hold.token == token for hold in entry.holds.values()):
                        return key
        return KEYS[0]

    def key_of_ticket(self, ticket: bytes) -> bytes:
        for table in self.tables:
            for partition in table.each_partition():
                if ticket in partition.reserved:
                    return partition.reserved[ticket].entry.key
        return b""

    # What happens.

    def acquire(self) -> None:
        space, key, limit = self.what()
        said, timeout = self.fitting(limit), self.dice.choice([0, 3, 30, 30])
        reserve = Reserve(*(self.dice.choice([0, 900, 4000]) for _ in "12"))
        more = {"reserve": reserve} if self.dice.random() < 0.3 else {}
        self.come(key, Acquire(space, key, limit, timeout, 8, **said, **more))

    def come(self, key: bytes, request: Request) -> None:
        """Ask for a slot; a newcomer passes nobody who waits for several."""
        table = self.tables[self.table_with(key)]
        [entry] = [
            partition.spaces[LOCK][key]
            for partition in table.each_partition()
            if key in partition.spaces[LOCK]
        ] or [None]
        may_pass = True
        is_due = table.deadlines.earliest <= self.now + LATE
        if entry is not None and entry.waiters and not (self.in_groups or self.changes or is_due):
            others = Others(entry, table.slots.max_holds, self.now - LATE)
            may_pass = others.is_passed_by_newcomers()
            self.seen["passes nobody"] += not may_pass
        reply = self.ask(key, request)
        assert may_pass or not isinstance(reply, Granted | Enqueued)

    def fitting(self, limit: int) -> dict[str, Any]:
        """What is said; no weight beside a limit of 1."""
        said = self.said()
        group = said["group"]
        if limit == 1 and group is not None and group.weight > 1:
            said["group"] = group._replace(weight=1) if group.name else None
        return said

    def enqueue(self) -> None:
        space, key, limit = self.what()
        turn = self.dice.choice([None, 0, 700, 2500])
        self.come(key, Enqueue(space, key, limit, 8, turn=turn, **self.fitting(limit)))

    def wait(self) -> None:
        key = self.dice.choice(KEYS)
        reserve = Reserve(900, 900) if self.dice.random() < 0.3 else None
        timeout = self.dice.choice([0, 2, 30])
        self.ask(key, Wait(LOCK, key, timeout, reserve), enqueued=True)

    def come_back(self) -> None:
        if self.tickets:
            key, ticket = self.tickets.pop(self.dice.randrange(len(self.tickets)))
            limit, rate = self.limits[key], self.rate if self.dice.random() < 0.7 else None
            timeout, turn = self.dice.choice([0, 5, 30]), self.dice.choice([None, None, 900])
            if self.dice.random() < 0.7:
                self.ask(key, Acquire(LOCK, key, limit, timeout, 8, rate, ticket=ticket))
            else:
                self.ask(key, Enqueue(LOCK, key, limit, 8, rate, ticket=ticket, turn=turn))

    def of_hold(self) -> None:
        if self.tokens:
            key, token = self.dice.choice(self.tokens)
            if self.dice.random() < 0.4:
                self.ask(key, Renew(LOCK, key, token, 8, How.BEGUN))
                return
            self.tokens.remove((key, token))
            end = Release(LOCK, key, token) if self.dice.random() < 0.8 else Unbegun(key, token)
            self.ask(key, end)

    def whose_turn(self) -> None:
        self.ask(self.dice.choice(KEYS), Next())

    def pass_on(self) -> None:
        if self.tickets:
            key, ticket = self.dice.choice(self.tickets)
            self.ask(key, Pass(key, ticket))

    def pause(self) -> None:
        key = self.dice.choice(KEYS)
        self.ask(key, Pause(key, self.dice.choice([None, 500, 2000])))
        if self.dice.random() < 0.6:
            self.ask(key, Resume(key))

    def disconnect(self) -> None:
        if self.peers:
            name, dice = self.dice.choice([*self.peers]), self.dice
            peer, table = self.peers.pop(name), self.tables[name[0]]
            ends = {"clean": dice.random() < 0.5, "silent": dice.random() < 0.2}
            self.heed(table.disconnect(peer, self.now, told=dice.random() < 0.7, **ends))

    def move(self) -> None:
        key = self.dice.choice(KEYS)
        shard, at = int(key), self.table_with(key)
        old, new = self.tables[at], self.tables[at - 1]
        if not isinstance(old, ShardTable) or not isinstance(new, ShardTable):
            return
        snapshot = old.freeze(shard, self.now)
        self.whose_turn()
        self.disconnect()
        if self.dice.random() < 0.5:
            self.heed(old.thaw(shard, self.now))
            return
        snapshot = old.freeze(shard, self.now)
        effects, _ = old.drop(shard, AWAY)
        self.epoch += 1
        new.open(shard, self.epoch << 40)
        new.load(shard, snapshot, self.now)
        self.heed(effects, key)
        self.seen["moved"] += 1

    def cut_off(self) -> None:
        table = self.dice.choice(self.tables)
        if isinstance(table, ShardTable):
            table.lapse()
            if self.dice.random() < 0.5:
                self.heed(table.send_away(self.now))
            self.dice.choice([self.disconnect, self.whose_turn, self.of_hold, self.wait])()
            self.heed(table.serve_until(1e9, self.now))

    def pass_time(self, seconds: float = 0) -> None:
        until = self.now + (seconds or self.dice.choice([0.1, 0.5, 1.1]))
        while dues := [d for t in self.tables if (d := t.next_deadline()) is not None]:
            if min(dues) > until:
                break
            self.now = max(self.now, min(dues))
            for table in self.tables:
                self.heed(table.advance(self.now))
        self.now = until

    def go_on(self) -> None:
        """Have what was more than fits a step."""
        for table in self.tables:
            while table.backlog:
                self.heed(table.advance(self.now))

    def check(self) -> None:
        self.go_on()
        for table in self.tables:
            for partition in table.each_partition():
                for entry in partition.spaces[LOCK].values():
                    self.check_entry(table, entry)

    def check_entry(self, table: LockTable, entry: Entry) -> None:
        used = 0
        for hold in entry.holds.values():  # each was granted where its limit had room
            assert used + min(hold.weight, hold.limit) <= hold.limit
            used += hold.weight
            assert hold.peer is None or not hold.peer.ended
        queue = entry.waiters
        if queue is None or not queue or queue.pause or entry.limit == 0:
            return
        rate = queue.rate
        if rate is not None and rate.deadline <= self.now + LATE:
            return  # it is about to be looked at
        others = Others(entry, table.slots.max_holds, self.now - LATE)
        assert list(others.could_go_on()) == [], self.now

    def run(self, steps: int) -> None:
        moves = {
            self.acquire: 8,
            self.enqueue: 6,
            self.wait: 6,
            self.come_back: 4,
            self.of_hold: 10,
            self.whose_turn: 6,
            self.pass_on: 1,
            self.pause: 0.4,
            self.disconnect: 1.5,
            self.move: 0.7,
            self.cut_off: 0.4,
            self.pass_time: 4,
        }
        for number, act in enumerate(self.dice.choices([*moves], [*moves.values()], k=steps)):
            act()
            self.check()
            if number % 5 == 0:
                for table in self.tables:
                    check_counts(table)
        self.end()

    def end(self) -> None:
        """All who hold something give it back, and nobody comes: each waiter has its turn."""
        for key in KEYS:
            self.ask(key, Resume(key))
        for _ in range(400):
            if not any(table.counts.waiting or table.counts.holding for table in self.tables):
                break
            while self.tokens:
                key, token = self.tokens.pop()
                self.ask(key, Release(LOCK, key, token))
                self.check()
            self.wait()
            self.whose_turn()
            self.come_back()
            self.pass_time(0.5)
            self.check()
        for at, number in [*self.peers]:
            self.tables[at].disconnect(self.peers.pop((at, number)), self.now, clean=True)
        self.pass_time(200)
        for table in self.tables:
            check_counts(table)
            assert len(table) == 0


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 5000), marks=pytest.mark.soak)], ids=len
)
@pytest.mark.parametrize("step", [STEP, 1])
@pytest.mark.timeout(900)
def test_who_can_go_on_does(seeds: range, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each step is as small as it can be."""
    for module in ("slots", "connections"):
        monkeypatch.setattr(f"dflockd.table.{module}.STEP", step)
    seen: Counter[str] = Counter()
    for seed in seeds:
        history = History(seed)
        history.run(150)
        seen += history.seen
    for what in ("Granted", "YourTurn", "TimedOut", "Moved", "moved", "passes nobody"):
        assert seen[what] > 9, seen
