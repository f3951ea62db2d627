"""Histories of a table and of the model: any at all, and those in which clients come and go."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import rule

from dflockd.table import Limits
from dflockd.wire import ALL, FairGroup, How, Owner, Rate, Reserve
from tests.dflockd.table.asked import Asked
from tests.dflockd.table.drawn import ENDS, MOST_PEERS, numbers


class TableMachine(Asked):
    """Does everything twice, in the real table and in the model, and compares."""

    @rule(quarters=st.integers(1, 10), told=st.booleans())
    def time_passes(self, quarters: int, told: bool) -> None:
        """With or without the timer of the server going off."""
        self.model.now += quarters / 4
        if told:
            self.advance()

    @rule(which=numbers, told=st.booleans())
    def time_passes_to_a_deadline(self, which: int, told: bool) -> None:
        """Exactly: what comes next happens at the same instant, or after an `advance`."""
        deadlines = sorted(d for d in self.model.deadlines() if d > self.model.now)
        if deadlines:
            self.model.now = deadlines[which % min(3, len(deadlines))]
            if told:
                self.advance()

    # The end: drained or not, whatever is left ends, and then nothing is left.

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        self.greet(b"")
        for name in [name for name, key in self.model.keys.items() if key.pause]:
            self.resume(len(self.peers) - 1, name)
            self.state_is_the_same()
        if self.model.grants % 2:
            keep = self.model.grants % 4 == 1
            self.model.advance(self.places())
            self.model.drain(keep=keep)
            self.compare(self.table.drain(self.model.now, keep=keep))
            self.state_is_the_same()
            for choice in range(len(self.peers)):
                self.acquire(choice, (0, b"a"), 1, 5, None)
                self.enqueue(choice, (1, b"a"), 1, None)
                self.renew(choice, choice, None, [How.PLAIN, How.CONFIRM][choice % 2])
                self.release(choice, choice)
            self.state_is_the_same()
        while self.peers:
            self.disconnect(self.model.grants, ENDS[len(self.peers) % len(ENDS)])
            self.state_is_the_same()
        while (deadline := self.table.next_deadline()) is not None:
            self.model.now = max(self.model.now, deadline)
            self.advance()
            self.state_is_the_same()
        assert not self.model.keys
        assert not self.model.away
        assert len(self.table) == 0
        assert not self.table._partition.reserved
        assert not self.table.connections.peers
        assert not self.table.deadlines._chains
        assert not self.table.deadlines._heads


def come_and_go(
    seed: int,
    *,
    in_groups: bool = False,
    rated: bool = False,
    weighed: bool = False,
    paused: bool = False,
) -> TableMachine:
    """A few peers about two keys, with many positions that are kept: chance alone makes few."""
    dice = random.Random(seed)
    machine = TableMachine()
    waiters = dice.choice([0, 0, 0, 3])
    keys = dice.choice([[(0, b"a")], [(0, b"b")], [(0, b"a"), (0, b"b")]])
    if (in_groups or weighed) and seed % 3:
        keys = [(0, b"b")]
    times = dice.choice([[0, 1000, 2500], [0], [2500, 5000]]), dice.choice([[0, 500], [1000, 3000]])
    usual_rate = dice.choice([Rate(1, 751), Rate(2, 2003), Rate(3, 1502), Rate(5, 5003)])
    # Sometimes there is room for the usual rate of one key, and no more.
    runs = usual_rate.runs if seed % 4 > 2 else 1_000_000
    odds = random.Random(f"limits {seed}")  # what is seldom set changes no other choice
    seldom = {
        "orphan_ttl": odds.choice([0, 0, 2]),
        "orphan_all": odds.random() < 0.4,
        "auto_release": odds.random() < 0.9,
    }
    machine.begin(
        Limits(default_lease=10, max_lease=20, max_waiters=waiters, max_rate_runs=runs, **seldom)
    )
    usual = {b"a": 1, b"b": 3}
    changes = dice.random() < 0.5

    def number() -> int:
        return dice.randrange(1000)

    def some() -> dict[str, object]:
        """What a request says this time: of whom it is, and of which group."""
        said: dict[str, object] = {"owner": None, "label": dice.choice([b"", b"me"])}
        if dice.random() < 0.2:
            said["owner"] = Owner(b"run", dice.randrange(3))
        if in_groups and dice.random() < 0.8:
            name = dice.choice([b"one", b"one", b"two", b"three"])
            said["group"] = FairGroup(name, dice.choice([0, 1, 1, 2]))
        if weighed and dice.random() < 0.4:
            group = said.get("group") or FairGroup(b"")
            assert isinstance(group, FairGroup)
            said["group"] = group._replace(weight=dice.choice([2, 2, 3, ALL]))
        if rated:
            other = Rate(dice.choice([1, 2, 5]), usual_rate.window)
            said["rate"] = dice.choice(
                [*[usual_rate] * 8, None, other] if changes else [usual_rate]
            )
        return said

    def key() -> tuple[tuple[int, bytes], int]:
        """Return one, and its limit: mostly what everybody says."""
        name = dice.choice(keys)
        is_other = changes and dice.random() < 0.2
        return name, dice.choice([1, 2, 3]) if is_other else usual[name[1]]

    def turn(chance: float) -> int | None:
        # None ends at the instant at which a place is free.
        return dice.choice([*times[1], 1000]) + 7 * rated if dice.random() < chance else None

    def enter() -> None:
        machine.enqueue(number(), *key(), dice.choice([None, 3]), some(), turn(0.3))

    def go() -> None:
        """Somebody with a waiter, or else with a new one, waits there, and means to come back."""
        reserve = Reserve(*map(dice.choice, times))
        ready = [peer for peer in machine.peers.values() if peer.waiting is None]
        having = [at for at, peer in enumerate(ready) if peer.enqueued]
        timeout = dice.choice([0, 0, 1])
        if not having or dice.random() < 0.2:
            machine.acquire(number(), *key(), timeout, None, some(), reserve)
        else:
            choice = dice.choice(having)
            machine.wait(choice, dice.choice([*ready[choice].enqueued]), timeout, reserve)

    def return_() -> None:
        reserve = Reserve(*map(dice.choice, times)) if dice.random() < 0.3 else None
        limit, timeout = usual[keys[0][1]], dice.choice([0, 3, 10])
        two_phase = dice.random() < 0.5
        machine.come_back(
            *(number(), number(), limit, None, timeout, some(), two_phase),
            turn=turn(0.2),
            reserve=reserve,
        )

    def of_one_process(count: int) -> list[int]:
        """Return so many connections of one process, that wait for nothing."""
        ready = [peer for peer in machine.peers.values() if peer.waiting is None]
        same = [at for at, peer in enumerate(ready) if peer.instance == b"here"]
        return dice.sample(same, min(count, len(same)))

    def enter_twice() -> None:
        """The same process from two connections: the former is lost by then."""
        name, limit = key()
        for choice in of_one_process(2):
            said = some() | {"owner": Owner(b"run", 1)}
            ticket = machine.tickets[-1][1] if machine.tickets and dice.random() < 0.5 else b""
            machine.enqueue(choice, name, limit, None, said, turn(0.8), ticket)

    def show_a_ticket_again() -> None:
        """A position is taken up; the connection is lost, and the ticket is shown once more."""
        known = machine.known_tickets(0)
        if not known:
            return
        name, ticket = dice.choice(known)
        said = some() | {"owner": Owner(b"run", 1)}
        for choice in of_one_process(2):
            machine.acquire(choice, name, usual[name[1]], 3, None, said, None, ticket)

    def ask() -> None:
        """Whose turn it is, mostly on a connection of a process that somebody waits for."""
        instances = [waiter.instance for waiter in machine.model.with_turns()]
        ready = [peer for peer in machine.peers.values() if peer.waiting is None]
        having = [at for at, peer in enumerate(ready) if peer.instance in instances]
        machine.ask_whose_turn_it_is(dice.choice(having) if having else number())

    def say_nothing() -> None:
        """A process that has been stopped is told of the turn of one of its runs."""
        name, limit = key()
        for choice in of_one_process(2):
            machine.enqueue(choice, name, limit, None, some(), turn(1))
        ask()
        for _ in range(2):
            if rated:
                machine.pass_time(0.75)
            else:
                machine.time_passes_to_a_deadline(number(), True)

    def stop_asking() -> None:
        """Others wait behind a process that asks and needs several slots; then it asks no more."""
        for name in dice.sample(keys, len(keys)):
            limit, said = max(2, usual[name[1]]), some()
            if dice.random() < 0.5:
                said.pop("rate", None)
            machine.acquire(number(), name, limit, 0, None, said)
            for choice in of_one_process(1):
                group = said.get("group") or FairGroup(b"")
                assert isinstance(group, FairGroup)
                said["group"] = group._replace(weight=dice.choice([2, 3, ALL]))
                machine.enqueue(choice, name, limit, None, said, 1000)
            for choice in of_one_process(1):
                machine.ask_whose_turn_it_is(choice)
            machine.acquire(number(), name, limit, 5, None, said | {"group": some().get("group")})
        asking = [number for number, peer in machine.model.peers.items() if peer.asks]
        if asking and dice.random() < 0.7:
            machine.disconnect(sorted(machine.peers).index(dice.choice(asking)), ENDS[0])

    def newer() -> None:
        """Runs with ages, some of which go away and come back, or are told."""
        name = (0, b"a")
        top = max([0, *(age for age, _ in machine.model.newest.values())])
        for more in (dice.choice([0, 1]), dice.choice([-1, 2])):
            choice, age = number(), max(1, top + more)
            said = some() | {"owner": Owner(b"run-%d" % age, 0, age)}
            machine.enqueue(choice, name, 1, None, said, turn(0.6))
            if dice.random() < 0.5:
                machine.wait(choice, name, dice.choice([0, 5]), Reserve(1000, 500), age)
            machine.listen(choice, 0)

    def older_returns() -> None:
        """To a position that was kept before a newer one came."""
        said = some() | {"owner": Owner(b"run-1", 0, 1)}
        machine.come_back(number(), 1, 1, None, 3, said, dice.random() < 0.5)

    def crash() -> None:
        machine.crash(0 if rated else 4 * dice.randrange(2), 0, 0)

    moves = {
        newer: 1,
        older_returns: 0.5,
        crash: 0.05,
        enter: 4,
        enter_twice: 0.5,
        show_a_ticket_again: 0.3,
        say_nothing: 0.5,
        ask: 4,
        go: 6,
        return_: 4,
        lambda: machine.acquire(number(), *key(), dice.choice([0, 3]), None, some()): 2,
        lambda: machine.wait_for_a_grant(number(), dice.choice([0, 1, 5]), None): 1,
        lambda: machine.release(number(), number()): 5,
        lambda: machine.let_pass(number(), number()): 1,
        lambda: machine.disconnect(number(), ENDS[0]): 0.8,
    }
    if rated:
        moves |= {
            lambda: machine.pass_time(dice.choice([0.25, 0.25, 0.5, 1.0])): 6,
            lambda: machine.renew(number(), number(), None, How.BEGUN): 3,
            lambda: machine.unbegun(number(), number()): 1.2,
            lambda: machine.disconnect(number(), dice.choice(ENDS)): 0.8,
            lambda: machine.acquire(number(), *key(), 0, None, some()): 2,
        }
    else:
        moves |= {
            lambda: machine.time_passes(dice.choice([1, 1, 2, 4]), dice.random() < 0.5): 4,
            lambda: machine.time_passes_to_a_deadline(number(), dice.random() < 0.5): 2,
        }

    if weighed:
        moves |= {stop_asking: 4}
    if paused:
        spans = [None, 500, 1000, 2500, 6000]
        moves |= {
            lambda: machine.pause(
                number(), key()[0], dice.choice(spans), dice.choice([b"", b"me"])
            ): 2,
            lambda: machine.resume(number(), key()[0]): 2,
            crash: 0.5,
        }

    for number_of_move, move in enumerate(dice.choices([*moves], [*moves.values()], k=150)):
        if len(machine.peers) < MOST_PEERS:
            machine.connect(dice.choice([b"", b"here", b"here", b"there"]))
        move()
        if number_of_move % 2:
            machine.check_all()
    return machine
