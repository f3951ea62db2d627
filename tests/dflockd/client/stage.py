"""A small world for sessions: simulated time, links that break, processes, and a look at all of it.

What runs is real: `LockSession`, `Lease`, `renewal`, the pool, and what is said on connections.
Simulated are the clock, the sockets below, and the reactor's thread, whose flows are tasks here like
those of the owners. All that happens is an event in one heap, so that a run is its seed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from dflockd import clock
from dflockd.address import Address
from dflockd.client import connection, conversation, lease, routing, session
from dflockd.client.connection import Connection, Route
from dflockd.client.flow import Pause
from dflockd.client.lease import Lease
from dflockd.client.session import TRANSITIONS, LockSession
from dflockd.wire import Acquire, Enqueue, Moved, Release, Renew, RequestReader, Wait
from tests.collector import collector_off
from tests.dflockd.client.homes import Home, Task, WatchedLease, WatchedSession, stages
from tests.dflockd.client.service import NUM_SHARDS, Service
from tests.dflockd.client.weather import BrokenRuleError, Weather
from tests.dflockd.client.wires import NO, FakeLink, Wire
from tests.dflockd.client_support import in_this_thread

ABOUT_A_LOCK = (Acquire, Enqueue, Wait, Renew, Release)
START = 1000.0


def _chance_here(rng: Random, elsewhere: Any) -> SimpleNamespace:
    """Return the chance of this thread: what another draws, of before, would make it another world."""
    names = "random", "sample", "uniform"
    return SimpleNamespace(
        **{name: in_this_thread(getattr(rng, name), getattr(elsewhere, name)) for name in names}
    )


class Stage:
    """One world.

    Args:
        seed: all that happens follows from it.
        weather: what goes wrong; by default the seed says that as well.
        servers: how many; more than one are a cluster.
        limit: how many may hold the key.
    """

    def __init__(
        self, seed: int, weather: Weather | None = None, servers: int = 1, limit: int = 1
    ) -> None:
        self.rng = Random(seed)
        self.now = START
        self.weather = Weather() if weather is None else weather
        self.descriptors: dict[int, Wire] = {}
        """The wires that are open, by their numbers. A number that was closed is the next one's."""
        self.addresses = [Address("10.0.0.1", 6000 + number) for number in range(servers)]
        self.service = Service(self, self.addresses, is_cluster=servers > 1, limit=limit)
        self.current: Task | None = None
        self.homes: list[Home] = []
        self.sessions: list[WatchedSession] = []
        self.leases: list[WatchedLease] = []
        self.wires: list[Wire] = []
        self.tickets: list[bytes] = []
        """Of turns that were told, and that somebody may take up."""
        self.detached: list[bytes] = []
        """The tokens of holds that a session has let go on without it."""
        self.stalled: dict[int, float] = {}
        self.transitions: set[tuple[str, str]] = set()
        self.faults: list[BrokenRuleError] = []
        self.is_calm = False
        """Whether nothing goes wrong any more."""
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    @contextmanager
    def set_up(self) -> Iterator[None]:
        """Let the real code run here. What other tests have left is not collected meanwhile."""
        connection.published.clear()
        with collector_off(), pytest.MonkeyPatch.context() as patch:
            for owner, name, simulated in (
                (clock, "now", lambda: self.now),
                (connection, "_reach", self._reach),
                (conversation, "_exchange", self._watched(conversation._exchange)),
            ):
                patch.setattr(owner, name, in_this_thread(simulated, getattr(owner, name)))
            for owner, name in (lease, "_chance"), (routing, "random"):
                patch.setattr(owner, name, _chance_here(self.rng, getattr(owner, name)))
            patch.setattr(session, "Lease", in_this_thread(WatchedLease, Lease))
            stages.append(self)
            try:
                yield
            finally:
                connection.published.clear()
                stages.pop()
                self._events.clear()

    # Time.

    def at(self, when: float, what: Callable[[], object]) -> None:
        """Do something at some time."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), what))

    def soon(self, what: Callable[[], object], within: float) -> None:
        """Do something by chance within so many seconds."""
        self.at(self.now + self.rng.random() * within, what)

    def run(self, until: Callable[[], bool], *, seconds: float = 3600.0) -> None:
        """Let things happen, and look at all that happens.

        Raises:
            BrokenRuleError: a rule was broken.
        """
        end = self.now + seconds
        while not until():
            assert self._events, "nothing is left to happen"
            when, _, what = heapq.heappop(self._events)
            assert when < end, "it does not come to an end"
            self.now = when
            self._look()
            what()
            self._look()
            if self.faults:
                raise self.faults[0]

    def pass_time(self, seconds: float) -> None:
        """Let so much time pass."""
        over: list[bool] = []
        self.at(self.now + seconds, lambda: over.append(True))
        self.run(lambda: bool(over))

    # Chance.

    def chance(self, what: str) -> bool:
        """Return whether something goes wrong now."""
        likely: float = getattr(self.weather, what)
        return likely > 0 and not self.is_calm and self.rng.random() < likely

    def some_refusal(self, server: int) -> Any:
        if self.service.is_cluster and self.rng.random() < 0.3:
            to = self.addresses[self.rng.randrange(len(self.addresses))]
            epoch = self.service.epoch + self.rng.choice((-1, 0, 1))
            return Moved(self.rng.randrange(NUM_SHARDS), epoch, str(to).encode())
        return self.rng.choice(NO)

    def trouble(self) -> None:
        """Let happen what happens by itself, a few times in each second."""
        if self.is_calm:
            return
        rng, service = self.rng, self.service
        for wire in self.wires:
            if not wire.closed and self.chance("breaks"):
                wire.break_off()
        if self.chance("server_stall"):
            self.stalled[rng.randrange(len(self.addresses))] = self.now + rng.uniform(0.5, 6.0)
        if self.chance("process_stall"):
            rng.choice(self.homes).stalled_until = self.now + rng.choice((0.5, 3.0, 12.0, 50.0))
        if self.chance("evict"):
            service.evict()
        if self.chance("restart") and not service.is_moving:
            self._restart()
        if self.chance("move") and service.is_cluster and not service.down:
            service.begin_move()
            to = rng.randrange(len(self.addresses))
            self.at(self.now + rng.random() * 2, lambda: service.end_move(to))
        self.at(self.now + rng.random(), self.trouble)

    def _restart(self) -> None:
        server = self.service.owner
        # Of a cluster another takes its place, and waits for those who hold.
        for peer in self.service.restart(keeps=self.service.is_cluster or self.rng.random() < 0.5):
            for wire in self.wires:
                if wire.peer is peer:
                    wire.break_off()
        self.service.down.add(server)
        up_again = self.now + self.rng.random() * 4
        self.at(up_again, lambda: self.service.down.discard(server))
        if self.service.is_cluster:
            self.service.begin_move()
            others = [n for n in range(len(self.addresses)) if n != server]
            self.at(up_again, lambda: self.service.end_move(self.rng.choice(others)))

    # Descriptors.

    def open_descriptor(self, wire: Wire) -> int:
        """Return the number of a new wire: the lowest that is free, as of the system."""
        number = next(n for n in itertools.count(10) if n not in self.descriptors)
        self.descriptors[number] = wire
        return number

    def close_descriptor(self, wire: Wire) -> None:
        """Free the number of a wire. A poller that knows it takes the next one for this one."""
        del self.descriptors[wire.number]
        for home in self.homes:
            for task in home.tasks:
                if task.watched is not None and task.watched.wire is wire:
                    self.wrong("who registers a descriptor closes it", f"{wire} is watched")

    # What the real code stands on.

    def _reach(self, route: Route, until: float, made: Any) -> Generator[Any, Any, Connection]:
        task = self.current
        assert task is not None
        server = self.addresses.index(route.address)
        yield Pause(self.rng.random() * 0.05)
        if self.chance("deaf"):
            if self.rng.random() < 0.5:
                raise ConnectionRefusedError
            yield Pause(max(0.0, until - self.now))
            raise TimeoutError
        if server in self.service.down:
            raise ConnectionRefusedError
        wire = Wire(self, task.home, server)
        self.wires.append(wire)
        link = FakeLink(wire, route)
        if made is not None:
            made(link)
        return link

    def _watched(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        def watched(link: Any, *arguments: Any) -> Any:
            task, under_way = self.current, arguments[-1]
            if link.closed and under_way is None:
                self.wrong("step after close", f"a talk on {link}")
            wire = link.wire
            if wire.talking is not None:
                self.wrong("one user of a link at a time", f"{link}")
            wire.talking = task
            try:
                return (yield from exchange(link, *arguments))
            finally:
                wire.talking = None

        return watched

    # What is looked at.

    def wrong(self, rule: str, text: str) -> None:
        """A rule is broken."""
        self.faults.append(BrokenRuleError(rule, f"{text}, after {self.now - START:.3f} s"))

    def heard(self, data: bytes) -> None:
        if self.current is not None:
            self.current.lines.append(data)

    def look_at_request(self, wire: Wire, data: bytes) -> None:
        link, task = wire.link(), self.current
        assert link is not None
        if wire.talking is not task and wire.talking is not None:
            self.wrong("one user of a link at a time", f"{link} is sent {data!r}")
        if any(link is each for each in wire.home.pool.idle):
            self.wrong("every link closed or given back once", f"{link} is idle, and sent {data!r}")
        if task is None or task.session is None:
            return
        reader = RequestReader()
        reader.receive(data)
        request = reader.next_request()
        while request is not None:
            if isinstance(request, ABOUT_A_LOCK) and link not in standing_on(task.session):
                self.wrong("an attribute before bytes go out", f"{link}: {request}")
            request = reader.next_request()

    def look_at_links_of(self, task: Task) -> None:
        """A call is over: what it had is closed, idle, or stood on."""
        for wire in self.wires:
            if wire.user is task:
                wire.user = None
                link = wire.link()
                if not wire.has_ended and (link is None or not self._is_accounted_for(wire, link)):
                    self.wrong("every link closed or given back once", f"{wire} is lost")

    def _is_accounted_for(self, wire: Wire, link: FakeLink) -> bool:
        return (
            any(link is each for each in wire.home.pool.idle)
            or any(link in standing_on(each) for each in self.sessions)
            or any(link is each.link for each in self.leases if not each.is_over)
            # Whoever has ended it may still wait for an answer on it; it is looked at again at the end.
            or (
                any(task.session is not None for task in wire.home.tasks)
                and any(link is each.link for each in self.leases if each.is_over)
            )
            # The reactor has been told, and is about to take it.
            or any(link is each.link and each.state == "abandoned" for each in self.leases)
        )

    def observe(self, session: WatchedSession) -> None:
        """Take in the state of a session."""
        was, session.was = session.was, session.state
        if was != session.was:
            self.transitions.add((was, session.was))
            if (was, session.was) not in TRANSITIONS:
                self.wrong("only the transitions of the table", f"{was} -> {session.was}")

    def _look(self) -> None:
        for each in self.sessions:
            self.observe(each)
            self.transitions.add((each.was_before, each.was))
            each.was_before = each.was
            lease = each.lease
            if lease is not None and lease.held:
                self._look_at_belief(lease)
        for lease in self.leases:
            if lease.losses > 1:
                self.wrong("told of a loss once", f"{lease.losses} times")
            if lease.losses and lease.state != "lost":
                self.wrong("told of a loss once", f"of one that is {lease.state}")
        is_honest = not self.weather.lie and not self.weather.refuse
        for home in self.homes:
            for link in home.pool.idle:
                if link.closed:
                    self.wrong(
                        "every link closed or given back once", f"{link} is idle, and closed"
                    )
                wire = link.wire
                if is_honest and wire.peer.place in self.service.queue:
                    self.wrong("who leaves has no position", f"{wire} is idle")
                if any(link in standing_on(each) for each in self.sessions):
                    self.wrong("every link closed or given back once", f"{link} is idle, and used")

    def _look_at_belief(self, lease: Lease) -> None:
        """A session says `held`: so does the service, or the news has not come yet."""
        if self.weather.lie:
            return
        wire = lease.link.wire  # type: ignore[attr-defined]
        if wire.seen or wire.has_ended:
            self.wrong("held is certain", f"{wire} has broken, and it says held")
        ended = self.service.ended.get(lease.token)
        if ended is None or ended.why == "evicted":
            return
        told = "it was released, or its lease is over"
        if ended.why in ("parted", "forgotten") and ended.peer is not None:
            stood_on = next(wire for wire in self.wires if wire.peer is ended.peer)
            if not stood_on.has_ended and not stood_on.seen:
                return
            told = f"its end of {stood_on} is closed"
        elif ended.why == "forgotten":
            return
        self.wrong("held is certain", f"the service has ended it ({ended.why}; {told})")


def standing_on(session: LockSession) -> list[Connection]:
    """Return the links that are attributes of a session."""
    found = [session.asking, session.queued, session.telling]
    if session.lease is not None and not session.lease.is_over:
        found.append(session.lease.link)
    return [link for link in found if link is not None]
