"""Histories of a table and of the model: any at all, and those in which clients come and go."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import (
    rule,
)

from dflockd.table import (
    Limits,
)
from dflockd.wire import (
    Begun,
    InGroup,
    Owner,
    Rate,
    Request,
    Space,
    Unbegun,
)
from tests.dflockd.table.asked import Asked
from tests.dflockd.table.drawn import (
    ENDS,
    MOST_PEERS,
    numbers,
)
from tests.dflockd.table.naive_state import PlacesOfRate


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

    def begin_or_not(self, which: int, *, begun: bool) -> None:
        name, token = self.live_token(which)
        if begun:
            request: Request = Begun(Space(name[0]), name[1], token, None)
            self.ask(which, request, "begun", name, token, None)
        else:
            self.ask(which, Unbegun(Space(name[0]), name[1], token), "unbegun", name, token)

    # The end: drained or not, whatever is left ends, and then nothing is left.

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        if self.model.grants % 2:
            keep = self.model.grants % 4 == 1
            self.model.drain(keep=keep)
            self.compare(self.table.drain(self.model.now, keep=keep))
            self.state_is_the_same()
            for choice in range(len(self.peers)):
                self.acquire(choice, (0, b"a"), 0, 5, None)
                self.enqueue(choice, (1, b"a"), 0, None)
                self.renew(choice, choice, None, choice % 2 == 0)
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
        assert not self.table._group.reserved
        assert not self.table._peers
        assert not self.table.deadlines._chains
        assert not self.table.deadlines._heads


def come_and_go(seed: int, *, in_groups: bool = False, rated: bool = False) -> TableMachine:
    """A few peers about two keys, with many positions that are kept: chance alone makes few."""
    dice = random.Random(seed)
    machine = TableMachine()
    machine.begin(Limits(default_lease=10, max_lease=20, max_waiters=dice.choice([0, 0, 0, 3])))
    keys = dice.choice([[(0, b"a")], [(1, b"b")], [(0, b"a"), (1, b"a")]])
    if in_groups and seed % 3:
        keys = [(1, b"b")]
    times = dice.choice([[0, 1000, 2500], [0], [2500, 5000]]), dice.choice([[0, 500], [1000, 3000]])
    for number_of_key, name in enumerate(keys if rated else ()):
        runs, window = dice.choice([(1, 751), (2, 2003), (3, 1502), (5, 5003)])
        window += 7 * number_of_key  # places of two keys are not free at the same instant
        machine.rates[name] = Rate(runs, window)
        machine.model.rates[name] = PlacesOfRate(runs, window / 1000)

    def number() -> int:
        return dice.randrange(1000)

    def belong(choice: int) -> None:
        if in_groups and dice.random() < 0.8:
            name, limit = dice.choice([b"one", b"one", b"two", b"three"]), dice.choice([0, 1, 1, 2])
            machine.in_group(choice, InGroup(name, limit))

    def enter() -> None:
        choice = number()
        belong(choice)
        if dice.random() < 0.3:
            machine.want_turn(choice, dice.choice(times[1]))
        machine.enqueue(choice, dice.choice(keys), 0, dice.choice([None, 3]))

    def go() -> None:
        away, hold = map(dice.choice, times)
        if dice.random() < 0.2:
            owner = Owner(b"run", dice.randrange(3), dice.choice([b"", b"here"]))
            machine.own(number(), dice.choice([owner, None]))
        which = number()
        belong(which)
        machine.wait_and_keep(dice.choice(keys), which, dice.choice([0, 0, 1]), away, hold)

    def return_() -> None:
        if dice.random() < 0.2:
            machine.want_turn(number(), 1000)
        machine.come_back(number(), number(), dice.choice([0, 3, 10]), None, dice.random() < 0.5)

    def enter_twice() -> None:
        """The same process from two connections: the former is lost by then."""
        name = dice.choice(keys)
        for choice in (number(), number()):
            machine.own(choice, Owner(b"run", 1, b"here"))
            if dice.random() < 0.8:
                machine.want_turn(choice, 1000)
            machine.enqueue(choice, name, 0, None)

    def say_nothing() -> None:
        """A process that has been stopped is told of the turns of its runs."""
        name = dice.choice(keys)
        for run in (b"run", b"other"):
            choice = number()
            machine.own(choice, Owner(run, 1, b"here"))
            machine.want_turn(choice, 1000)
            machine.enqueue(choice, name, 0, None)
        for _ in range(2):
            if rated:
                machine.pass_time(0.75)
            else:
                machine.time_passes_to_a_deadline(number(), True)

    def newer() -> None:
        """Runs with ages, some of which go away and come back, or are told."""
        name = (0, b"a")
        top = max([0, *machine.model.newest.values()])
        for age in (top + dice.choice([0, 1]), top + dice.choice([-1, 2])):
            choice = number()
            machine.own(choice, Owner(b"run-%d" % age, 0, b"here", None, max(1, age)))
            if dice.random() < 0.6:
                machine.want_turn(choice, 1000)
            machine.enqueue(choice, name, 0, None)
            if dice.random() < 0.5:
                machine.keep(choice, 1000, 500)
                machine.wait(choice, name, dice.choice([0, 5]))
            machine.listen(choice, 0)

    def older_returns() -> None:
        """To a position that was kept before a newer one came."""
        choice = number()
        machine.own(choice, Owner(b"run-1", 0, b"there", None, 1))
        machine.come_back(choice, 1, 3, None, dice.random() < 0.5)

    def crash() -> None:
        machine.crash(0 if rated else 4 * dice.randrange(2), 0, 0)

    def ask() -> None:
        choice = number()
        belong(choice)
        machine.acquire(choice, dice.choice(keys), 0, dice.choice([0, 3]), None)

    moves = {
        newer: 0.7,
        older_returns: 0.5,
        crash: 0.05,
        enter: 4,
        enter_twice: 0.5,
        say_nothing: 0.5,
        go: 6,
        return_: 4,
        ask: 2,
        lambda: machine.wait_for_a_grant(number(), number(), dice.choice([0, 1, 5])): 1,
        lambda: machine.release(number(), number()): 5,
        lambda: machine.let_pass(number(), number()): 1,
        lambda: machine.disconnect(number(), ENDS[0]): 0.8,
    }
    if rated:
        moves |= {
            lambda: machine.pass_time(dice.choice([0.25, 0.25, 0.5, 1.0])): 6,
            lambda: machine.begin_or_not(number(), begun=dice.random() < 0.7): 4,
            lambda: machine.disconnect(number(), dice.choice(ENDS)): 0.8,
            lambda: machine.acquire(number(), dice.choice(keys), 0, 0, None): 2,
        }
    else:
        moves |= {
            lambda: machine.time_passes(dice.choice([1, 1, 2, 4]), dice.random() < 0.5): 4,
            lambda: machine.time_passes_to_a_deadline(number(), dice.random() < 0.5): 2,
        }

    for number_of_move, move in enumerate(dice.choices([*moves], [*moves.values()], k=150)):
        if len(machine.peers) < MOST_PEERS:
            machine.connect()
        move()
        if number_of_move % 2:
            machine.check_all()
    return machine
