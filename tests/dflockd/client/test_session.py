"""The session alone, in a simulated world: whatever goes wrong, nobody believes in a lock that is gone.

Owners do what they like on a `stage`, which looks at everything after each step. That it would notice
is shown by faults that are put in on purpose: a copy of the rule taken out.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from dflockd import clock
from dflockd.client import conversation, forks, operations, renewal, routing
from dflockd.client import session as session_module
from dflockd.client.connection import Connection
from dflockd.client.lease import LOST, Lease
from dflockd.client.operations import GRACE
from dflockd.client.pool import Pool
from dflockd.client.session import TRANSITIONS, LockSession
from tests.dflockd.client.plays import play
from tests.dflockd.client.stage import START, Stage
from tests.dflockd.client.weather import BrokenRuleError, some_weather

RARE = {
    "a shorter lease begins once it is confirmed": 174,
    "of two connections the one that has not answered is closed": 178,
    "a position is left with its connection open": 47,
}
"""Planted faults that few worlds show, and the first world that does."""

QUICK = {*range(50), *RARE.values()}
"""Worlds in the quick run; the soak has many times as many."""

SOAK = range(10_000, 14_000)

PLANT_SEEDS = 400
"""Worlds in which a planted fault has to be found."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of locks are lost here, which is worth a line elsewhere."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def world(seed: int) -> set[tuple[str, str]]:
    """Let one world take its course; return which transitions were seen."""
    rng = Random(seed)
    stage = Stage(seed, some_weather(rng), rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2)))
    owners, processes, rudeness = (
        rng.choice((2, 3, 4)),
        rng.choice((1, 2)),
        rng.choice((0, 0.3, 0.7)),
    )
    with stage.set_up():
        try:
            play(stage, owners, processes, rudeness, 60.0)
        except BaseException as exc:
            exc.add_note(f"world {seed}, {len(stage.addresses)} servers, {stage.weather}")
            raise
    return stage.transitions


def test_in_no_world_a_rule_is_broken() -> None:
    seen: set[tuple[str, str]] = set()
    for seed in QUICK:
        seen |= world(seed)
    assert seen >= TRANSITIONS, f"not seen: {TRANSITIONS - seen}"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_in_none_of_many_worlds_a_rule_is_broken() -> None:
    for seed in SOAK:
        world(seed)


def test_a_thread_that_is_left_of_earlier_tests_keeps_its_clock() -> None:
    """It would plan what it does next by a time that the machine may reach in a quarter of an hour."""
    before = clock.now()
    with Stage(1).set_up(), ThreadPoolExecutor() as another:
        assert clock.now() == START
        assert before <= another.submit(clock.now).result() <= before + 60
    assert before <= clock.now() <= before + 60


def test_the_same_seed_is_the_same_world() -> None:
    def story(seed: int) -> list[object]:
        stage = Stage(seed, some_weather(Random(seed)), 2)
        with stage.set_up():
            play(stage, 3, 2, 0.5, 30.0)
        return [stage.rng.random(), len(stage.wires), len(stage.leases), stage.transitions]

    for seed in range(5):
        assert story(seed) == story(seed)


# Faults that are put in on purpose. Each says which rule has to be found broken.

Patch = Callable[[pytest.MonkeyPatch], None]
PLANTED: dict[str, tuple[str, Patch]] = {}


def planted(name: str, rule: str) -> Callable[[Patch], Patch]:
    def add(patch: Patch) -> Patch:
        PLANTED[name] = rule, patch
        return patch

    return add


@planted("a broken connection puts nothing in doubt", "held is certain")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "doubt", lambda self: None)


@planted("a lease has no end", "held is certain")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "held", property(lambda self: self._state == "held"))


@planted("a lease counts from the reply", "held is certain")
def _(patch: pytest.MonkeyPatch) -> None:
    real = operations.read_renewal

    def read(target: Any, token: bytes, answer: Any) -> Any:
        return real(target, token, answer._replace(sent=answer.received))

    patch.setattr(renewal, "read_renewal", read)


@planted("a shorter lease begins once it is confirmed", "held is certain")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "shorten", lambda self, seconds, now: None)


@planted("of two connections the one that has not answered is closed", "held is certain")
def _(patch: pytest.MonkeyPatch) -> None:
    real = renewal._Rescue._end

    def end(self: Any, link: Any) -> None:
        real(self, link)
        lease = self._keeper.lease
        spares, lease.spares = lease.spares, ()
        for spare in spares:
            spare.close()

    patch.setattr(renewal._Rescue, "_end", end)


@planted(
    "nobody waits for the end of a position", "the end of a position is what a server has said"
)
def _(patch: pytest.MonkeyPatch) -> None:
    def stay(target: Any, timeout: Any) -> Any:
        return False
        yield

    rest = {**vars(operations), "stay": stay}
    patch.setattr(session_module, "operations", SimpleNamespace(**rest))


@planted("a position is left with its connection open", "who leaves has no position")
def _(patch: pytest.MonkeyPatch) -> None:
    real = LockSession.abandon

    def abandon(self: Any) -> None:
        link, self.queued = self.queued, None
        if link is not None and not link.closed:
            self._home().pool.give(link)
        real(self)

    patch.setattr(LockSession, "abandon", abandon)


@planted("check() believes what is in doubt", "held is certain")
def _(patch: pytest.MonkeyPatch) -> None:
    real = LockSession.check

    def check(self: Any) -> Any:
        if self.state != "doubtful":
            yield from real(self)

    patch.setattr(LockSession, "check", check)


@planted("a lease that was released is told as lost", "told of a loss once")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Lease.end

    def end(self: Any, claim: object) -> bool:
        ended = real(self, claim)
        self._on_lost()
        return ended

    patch.setattr(Lease, "end", end)


@planted("each who finds a loss tells it", "told of a loss once")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Lease.lose

    def lose(self: Any, why: str) -> bool:
        self.__dict__.pop("_told_by", None)
        return real(self, why)

    patch.setattr(Lease, "lose", lose)


@planted("nobody tells of a loss", "told of a loss once")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Lease.lose

    def lose(self: Any, why: str) -> bool:
        self._on_lost = None
        return real(self, why)

    patch.setattr(Lease, "lose", lose)


@planted("an object has as many owners as come", "one owner at a time")
def _(patch: pytest.MonkeyPatch) -> None:
    def take(self: Any, claim: object) -> None:
        self._forks = forks.count
        self._owner["by"] = claim

    patch.setattr(LockSession, "_take_possession", take)


@planted(
    "the connection of a request is known to its flow alone", "an attribute before bytes go out"
)
def _(patch: pytest.MonkeyPatch) -> None:
    real = LockSession._talk

    def talk(self: Any, link: Any, *arguments: Any) -> Any:
        self.asking = None
        try:
            return (yield from real(self, link, *arguments))
        finally:
            self.asking = link

    patch.setattr(LockSession, "_talk", talk)


@planted(
    "who was refused the lock gives no connection back", "every link closed or given back once"
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pool, "give", lambda self, link, since: None)


@planted("a connection that was closed is given back", "every link closed or given back once")
def _(patch: pytest.MonkeyPatch) -> None:
    real = Pool.give

    def give(self: Any, link: Any, since: float | None) -> None:
        was, link.closed = link.closed, False
        real(self, link, since)
        link.closed = was

    patch.setattr(Pool, "give", give)


@planted("a connection is given back, and kept", "every link closed or given back once")
def _(patch: pytest.MonkeyPatch) -> None:
    real = LockSession._settle

    def settle(self: Any, grant: Any, claim: object) -> bool:
        link = self.asking
        settled = real(self, grant, claim)
        if settled:
            self._home().pool.give(link)
        return settled

    patch.setattr(LockSession, "_settle", settle)


@planted("a release goes to the connection that has broken", "step after close")
def _(patch: pytest.MonkeyPatch) -> None:
    real = LockSession._tell

    def tell(self: Any, operation: Any, link: Any, *others: Any) -> Any:
        lease = self.lease
        if link is None and lease is not None and lease.link.closed:
            self.telling = lease.link
            yield from conversation.talk(lease.link, operation(self.target, False))
        return (yield from real(self, operation, link, *others))

    patch.setattr(LockSession, "_tell", tell)


@planted("nobody asks for the connection", "every link closed or given back once")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "take", lambda self: self.link)
    patch.setattr(Lease, "put", lambda self, link: None)


@planted("a lock that is released is lost for a moment", "only the transitions of the table")
def _(patch: pytest.MonkeyPatch) -> None:
    real = LockSession._be_free

    def be_free(self: Any) -> None:
        if self.lease is not None:
            self.lease._end["by"] = LOST
            self.stage.observe(self)
        real(self)

    patch.setattr(LockSession, "_be_free", be_free)


@planted("no answer means that somebody else has it", "False is what a server has said")
def _(patch: pytest.MonkeyPatch) -> None:
    real = LockSession._begin

    def begin(self: Any, begin: Any, timeout: Any) -> Any:
        try:
            return (yield from real(self, begin, timeout))
        except session_module.errors.UnreachableError:
            if self.asking is None:
                raise
            return None

    patch.setattr(LockSession, "_begin", begin)


@planted("a server may take its time", "a time is kept")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operations, "give_up_at", lambda timeout, now: None)


@planted("a grace is a minute", "a time is kept")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operations, "GRACE", 30 * GRACE)


@planted("who is interrupted lets go of nothing", "who fails leaves nothing behind")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LockSession, "let_go", lambda self, claim: None)


@planted("nobody notices that what is held is forgotten", "a forgotten session lets go")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "_is_forgotten", lambda self, owner: None)


@planted("nobody notices that a position is forgotten", "a forgotten session lets go")
def _(patch: pytest.MonkeyPatch) -> None:
    def line_up(self: Any, link: Any) -> None:
        self.queued, self.waiter = link, {}

    patch.setattr(LockSession, "_line_up", line_up)


@planted("an error keeps a forgotten session alive", "a forgotten session lets go")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(routing, "without_frames", lambda error: error)


@planted("what a server says is believed to be a reply", "errors are of the tree")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operations, "_read", lambda parse, answer, target: parse(answer.line))
    patch.setattr("dflockd.client.conversation.UnexpectedReplyError", ZeroDivisionError)


@planted("whoever wants to closes a connection", "who registers a descriptor closes it")
def _(patch: pytest.MonkeyPatch) -> None:
    def close(self: Any) -> None:
        self.closed = True
        self._sock.close()

    patch.setattr(Connection, "close", close)


@planted("what is over is renewed all the same", "all comes to an end")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "is_over", property(lambda self: False))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, patch = PLANTED[name]
    patch(monkeypatch)
    found: list[str] = []
    # A world is its seed: what has shown the fault shows it again, until the code changes.
    for seed in (RARE.get(name, 0), *range(PLANT_SEEDS)):
        with contextlib.suppress(Exception):
            try:
                world(seed)
            except BrokenRuleError as exc:
                found.append(exc.rule)
        if rule in found:
            return
    raise AssertionError(f"not found: {rule}; but {set(found)}")
