"""A small world for sessions: simulated time, links that break, processes, and a look at all of it.

What runs is real: `Session`, `Lease`, `renewal`, `flows`, the pool, and what carries out a `Talk`.
Simulated are the clock, the sockets below, and the reactor's thread, whose flows are tasks here like
those of the owners. All that happens is an event in one heap, so that a run is its seed.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import math
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from random import Random
from typing import Any

import pytest

from dflockd.address import Address
from dflockd.client import abilities, clock, connection, lease, routing, session
from dflockd.client.connection import Connection, carry_out
from dflockd.client.introduction import ANONYMOUS
from dflockd.client.later import release_later, take_back
from dflockd.client.lease import Lease
from dflockd.client.pool import Pool
from dflockd.client.renewal import keep
from dflockd.client.session import TRANSITIONS, Session
from dflockd.client.steps import Flow, Hear, Link, Pause, Ready, Route
from dflockd.wire import (
    Acquire,
    Confirm,
    Detach,
    Enqueue,
    Granted,
    Moved,
    OwnerConflict,
    Pass,
    Recovering,
    Release,
    Renew,
    Renewed,
    ReplyReader,
    RequestReader,
    Status,
    TimedOut,
    Wait,
    YourTurn,
    encode_reply,
    format_token,
)
from tests.dflockd.client.book import Peer
from tests.dflockd.client.service import NUM_SHARDS, Service

ABOUT_A_LOCK = (Acquire, Enqueue, Wait, Pass, Renew, Confirm, Detach, Release)
START = 1000.0


class BrokenRuleError(AssertionError):
    """A rule was broken; `rule` says which."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


@dataclass
class Weather:
    """How likely it is that something goes wrong."""

    cut_request: float = 0.0
    """A request arrives in part, and the connection ends."""
    cut_reply: float = 0.0
    breaks: float = 0.0
    """Breaks of a connection in a second."""
    mute: float = 0.0
    """A connection swallows everything from some time on."""
    partial: float = 0.0
    """The kernel takes only a part of a request."""
    slow: float = 0.0
    """A reply takes seconds."""
    refuse: float = 0.0
    """A server refuses a request, or answers nonsense."""
    lie: float = 0.0
    """A server says yes without having done it: no belief can be right then."""
    deaf: float = 0.0
    """A server cannot be reached, or lets one wait to be connected."""
    server_stall: float = 0.0
    process_stall: float = 0.0
    restart: float = 0.0
    move: float = 0.0
    evict: float = 0.0


MOST = Weather(0.1, 0.1, 0.05, 0.05, 0.1, 0.1, 0.1, 0.0, 0.1, 0.02, 0.02, 0.02, 0.05, 0.02)


class Wire:
    """A connection from end to end; for its client it is a socket."""

    def __init__(self, stage: Stage, home: Home, server: int) -> None:
        self.stage = stage
        self.peer = Peer(server)
        self.peer.reply = self._reply
        self.number = next(stage.numbers)
        self.closed = False
        self.gone = False
        """Whether its client can know that it has ended, ..."""
        self.seen = False
        """... and whether it does."""
        self.home = home
        self.user: Task | None = stage.current
        """Whose call has it at the moment, ..."""
        self.talking: Task | None = None
        """... and is talking on it."""
        self.link: Callable[[], FakeLink | None] = lambda: None
        """Not the link itself: a forgotten one closes its socket."""
        self._inbox = b""
        self._mute = stage.chance("mute")
        self._is_in_part = False
        self._listeners: list[Callable[[], object]] = []
        self._requests = RequestReader()
        self._last_up = self._last_down = 0.0
        stage.service.peers[self.peer] = None

    # What a socket can do.

    def send(self, data: bytes) -> int:
        self.stage.look_at_request(self, data)
        if self.closed:
            # Who has sent a part finds out when the rest can be sent that somebody has closed it.
            if not self._is_in_part:
                self.stage.wrong("step after close", f"{self} is sent {data!r}")
            raise OSError(errno.EBADF, "closed")
        if self.gone:
            self.seen = True
            raise BrokenPipeError
        sent = len(data)
        if self.stage.chance("partial"):
            sent = self.stage.rng.randrange(sent)
            self._is_in_part = True
            if not sent:
                raise BlockingIOError
        self._carry_up(data[:sent])
        return sent

    def recv(self, most: int) -> bytes:
        if self.closed:
            raise OSError(errno.EBADF, "closed")
        if self._inbox:
            data = self._inbox[:most]
            if self.stage.chance("partial"):
                data = data[: self.stage.rng.randint(1, len(data))]
            self._inbox = self._inbox[len(data) :]
            self.stage.heard(data)
            return data
        if not self.gone:
            raise BlockingIOError
        self.seen = True
        if self.stage.rng.random() < 0.5:
            raise ConnectionResetError
        return b""

    def shutdown(self, _: int) -> None:
        self._carry_up(None)
        self._go()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._carry_up(None)

    def fileno(self) -> int:
        return -1 if self.closed else self.number

    # What the stage does.

    def __repr__(self) -> str:
        return f"wire {self.number} to {self.peer.server}"

    @property
    def is_readable(self) -> bool:
        return not self.closed and (bool(self._inbox) or self.gone)

    def listen(self, listener: Callable[[], object]) -> None:
        self._listeners.append(listener)

    def break_off(self) -> None:
        """Both sides learn sometime that it is no more."""
        self.stage.soon(self._go, 1.0)
        self.stage.soon(lambda: self.stage.service.end(self.peer), 1.0)

    def _go(self) -> None:
        self.gone = True
        self._tell()

    def _tell(self) -> None:
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def _carry_up(self, data: bytes | None) -> None:
        if self._mute:
            return
        stage = self.stage
        if data is not None and stage.chance("cut_request"):
            data = data[: stage.rng.randrange(len(data))]
            self.break_off()
        self._last_up = when = max(self._last_up, stage.now + stage.rng.uniform(0.0001, 0.2))
        stage.at(when, lambda: self._arrive(data))

    def _arrive(self, data: bytes | None) -> None:
        stage = self.stage
        up_again = stage.stalled.get(self.peer.server, 0.0)
        if stage.now < up_again:
            stage.at(up_again, lambda: self._arrive(data))
        elif data is None:
            stage.service.end(self.peer)
        elif self.peer.alive and not self.gone:
            # What has been on its way when its client saw the end goes nowhere.
            self._requests.receive(data)
            while (request := self._requests.next_request()) is not None:
                self._answer(request)
            if stage.chance("mute"):
                self._mute = True

    def _answer(self, request: Any) -> None:
        stage = self.stage
        if stage.chance("lie"):
            self._reply(stage.rng.choice(YES))
        elif not stage.chance("refuse"):
            stage.service.receive(self.peer, request)
        else:
            self._reply(stage.some_refusal(self.peer.server))

    def _reply(self, reply: Any) -> None:
        stage = self.stage
        if self._mute:
            return
        line = reply if isinstance(reply, bytes) else encode_reply(reply)
        if stage.chance("cut_reply"):
            line = line[: stage.rng.randrange(len(line))]
            self.break_off()
        delay = stage.rng.uniform(0.5, 6.0) if stage.chance("slow") else stage.rng.random() * 0.2
        self._last_down = when = max(self._last_down, stage.now + delay)

        def come() -> None:
            self._inbox += line
            self._tell()

        stage.at(when, come)


YES = (
    Granted(format_token(1 << 40, b"lie"), 5),
    Renewed(5),
    Status.OK,
    Status.QUEUED,
    b"acquired 0000000000000000%032d 5\n" % 0,
)
NO = (
    *(status for status in Status if status not in (Status.OK, Status.QUEUED)),
    Recovering(100),
    OwnerConflict(b"held", 1),
    TimedOut(b"t0"),
    YourTurn(b"t0"),
    b"\xff\xfe\n",
    b"\n",
    b"ok ok ok ok\n",
    b"ok x\nok y\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
)


class FakeLink(Connection):
    """A connection whose socket is a `Wire`."""

    def __init__(self, wire: Wire, route: Route) -> None:
        self.route = route
        self.closed = False
        self.introduction = ANONYMOUS
        self.refused = False
        self.knows_owners = None
        self.pooled = False
        self.idle_since = 0.0
        self.rested = False
        self.guard = None
        self.owed = False
        self.asked_at = 0.0
        self.left = math.inf
        self.poll = None
        self.reader = ReplyReader()
        self.is_tls = False
        self._sock: Any = wire
        wire.link = weakref.ref(self)

    @property
    def wire(self) -> Wire:
        wire: Wire = self._sock
        return wire

    def __repr__(self) -> str:
        return f"link over {self._sock}"


class Task:
    """A flow under way, of an owner or of the reactor."""

    def __init__(
        self,
        home: Home,
        flow: Flow[Any],
        *,
        session: Session | None = None,
        done: Callable[[object, BaseException | None], object] | None = None,
    ) -> None:
        self.home = home
        self.session = session
        """Of an owner's call; ``None`` for the reactor's."""
        self.stage = home.stage
        self.lines: list[bytes] = []
        """What this call has read."""
        self.steps = 0
        self.ended = False
        self._done = done
        self._waits = carry_out(flow)
        self._order = 0
        self._wait: Any = None

    def step(self, outcome: object) -> None:
        if self.ended:
            return
        self._order += 1
        self.steps += 1
        before, self.stage.current = self.stage.current, self
        try:
            wait = self._waits.send(outcome)
        except StopIteration as stop:
            self._end(stop.value, None)
        except BaseException as exc:
            self._end(None, exc)
        else:
            self._wait_for(wait)
        finally:
            self.stage.current = before

    def interrupt(self) -> None:
        """Do what drivers do when a signal handler raises, or a task is cancelled."""
        if not self.ended:
            before, self.stage.current = self.stage.current, self
            try:
                self._waits.close()
                self._end(None, KeyboardInterrupt())
            finally:
                self.stage.current = before

    def _end(self, result: object, error: BaseException | None) -> None:
        self.ended = True
        self.home.tasks.discard(self)
        if self._done is not None:
            self._done(result, error)
        elif error is not None:
            self.stage.wrong("the reactor's flows raise nothing", repr(error))
        self.stage.look_at_links_of(self)
        # Events that will never come about it must not keep a session alive.
        self.session, self._done, self._wait = None, None, None
        del self._waits

    def _wait_for(self, wait: Any) -> None:
        self._wait = wait
        if isinstance(wait, Connection):
            wait = self._wait = Ready(wait, False, self.stage.now + wait.left)
        if isinstance(wait, Pause):
            self._wake(None, wait.seconds)
        elif isinstance(wait, Hear):
            wait.signal.listen(self._woken(True))
            self._wake_at(False, wait.until)
        else:
            assert isinstance(wait, Ready), wait
            wire = wait.link.wire
            if wait.link.closed or wait.writes or wire.is_readable:
                self._wake(True, 0.0)
            else:
                wire.listen(self._woken(True))
            self._wake_at(False, wait.until)

    def _woken(self, outcome: object) -> Callable[[], None]:
        order = self._order

        def wake() -> None:
            if self._order == order:
                self._wake(outcome, 0.0)

        return wake

    def _wake_at(self, outcome: object, when: float) -> None:
        if when < math.inf:
            self._wake(outcome, max(0.0, when - self.stage.now))

    def _wake(self, outcome: object, seconds: float) -> None:
        order, stage = self._order, self.stage

        def go_on() -> None:
            nonlocal outcome
            if self._order != order or self.ended:
                return
            if stage.now < self.home.stalled_until:
                stage.at(self.home.stalled_until, go_on)
                return
            if isinstance(self._wait, Ready) and self._wait.link.wire.is_readable:
                outcome = True
            self.step(outcome)

        stage.at(stage.now + seconds + stage.rng.random() * 0.001, go_on)


class WatchedPool(Pool):
    """The pool; what is given back must be nobody's."""

    def __init__(self, home: Home) -> None:
        super().__init__()
        self._home = home

    @property
    def idle(self) -> list[Any]:
        return [link for idle in self._idle.values() for link in idle]

    def take(self, route: Route) -> Link | None:
        link = super().take(route)
        if link is not None:
            link.wire.user = self._home.stage.current  # type: ignore[attr-defined]
        return link

    def give(self, link: Link, since: float | None = None) -> None:
        if any(link is each for each in self.idle):
            self._home.stage.wrong("every link given back once", f"{link} again")
        super().give(link, since)


class FakeReactor:
    """What the reactor does, as tasks among the others."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._stage = home.stage

    def keep(self, lease: Lease) -> None:
        if lease.task is not None:
            self._stage.soon(lambda: self._poke(lease), 0.05)
            return

        def adopt() -> None:
            if self._stage.now < self._home.stalled_until:
                self._stage.at(self._home.stalled_until, adopt)
            elif not lease.is_over and lease.task is None:
                lease.task = self._home.run(keep(lease, self._home.pool))

        wait = self._stage.rng.uniform(0.1, 0.2)
        self._stage.at(self._stage.now + min(wait, lease.lease * lease.renew_ratio), adopt)

    def forget(self, lease: Lease) -> None:
        if lease.task is not None:
            self._stage.soon(lambda: self._poke(lease), 1.0)

    def release_later(self, lease: Lease) -> None:
        flow = release_later(lease, self._home.pool)
        self._stage.soon(lambda: self._home.run(flow), 0.01)

    def take_back(self, lease: Lease) -> None:
        flow = take_back(lease, self._home.pool)
        self._stage.soon(lambda: self._home.run(flow), 0.01)

    def cannot_be_awaited(self) -> bool:
        current = self._stage.current
        return current is not None and current.session is None

    def _poke(self, lease: Lease) -> None:
        task: Any = lease.task
        task.step(False)


class Home:
    """One process."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.pool = WatchedPool(self)
        self.reactor = FakeReactor(self)
        self.tasks: set[Task] = set()
        self.stalled_until = 0.0

    def run(self, flow: Flow[Any], **options: Any) -> Task:
        """Begin a flow, here and now."""
        task = Task(self, flow, **options)
        self.tasks.add(task)
        task.step(None)
        return task


class WatchedSession(Session):
    """A session whose every change of state is seen."""

    stage: Stage
    was = "free"
    was_before = "free"
    """Its state before the event that is happening."""
    is_watched = True

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if self.is_watched and name in ("asking", "queued", "lease"):
            self.stage.observe(self)


class WatchedLease(Lease):
    """A lease whose every change of state is seen, and every loss counted."""

    stage: Stage
    losses = 0

    def __init__(self, *args: Any) -> None:
        self.stage = _stages[-1]
        super().__init__(*args)
        self.stage.leases.append(self)
        self._on_lost = self._count

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in ("_state", "_owner"):
            for each in self.stage.sessions:
                self.stage.observe(each)

    def _count(self) -> None:
        self.losses += 1


_stages: list[Stage] = []


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
        self.numbers = itertools.count(10)
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
        """Let the real code run here."""
        abilities.forget_all()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock, "now", lambda: self.now)
            patch.setattr(lease, "_chance", self.rng)
            patch.setattr(routing, "random", self.rng)
            patch.setattr(session, "Lease", WatchedLease)
            patch.setattr(connection, "_reach", self._reach)
            patch.setattr(connection, "_talk", self._watched(connection._talk))
            _stages.append(self)
            try:
                yield
            finally:
                abilities.forget_all()
                _stages.pop()
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

    # What the real code stands on.

    def _reach(self, route: Route, until: float) -> Generator[Any, Any, Connection]:
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
        return FakeLink(wire, route)

    def _watched(self, talk: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watched(step: Any) -> Any:
            link, task = step.link, self.current
            if link.closed and step.under_way is None:
                self.wrong("step after close", f"a talk on {link}")
            wire = link.wire
            if wire.talking is not None:
                self.wrong("one user of a link at a time", f"{link}")
            wire.talking = task
            try:
                return (yield from talk(step))
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
                if not wire.closed and (link is None or not self._is_accounted_for(wire, link)):
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
        for home in self.homes:
            for link in home.pool.idle:
                if link.closed:
                    self.wrong(
                        "every link closed or given back once", f"{link} is idle, and closed"
                    )
                if any(link in standing_on(each) for each in self.sessions):
                    self.wrong("every link closed or given back once", f"{link} is idle, and used")

    def _look_at_belief(self, lease: Lease) -> None:
        """A session says `held`: so does the service, or the news has not come yet."""
        if self.weather.lie:
            return
        wire = lease.link.wire  # type: ignore[attr-defined]
        if wire.seen or wire.closed:
            self.wrong("held is certain", f"{wire} has broken, and it says held")
        ended = self.service.ended.get(lease.token)
        if ended is None or ended.why == "evicted":
            return
        told = "it was released, or its lease is over"
        if ended.why in ("parted", "forgotten") and ended.peer is not None:
            stood_on = next(wire for wire in self.wires if wire.peer is ended.peer)
            if not stood_on.closed and not stood_on.seen:
                return
            told = f"its end of {stood_on} is closed"
        elif ended.why == "forgotten":
            return
        self.wrong("held is certain", f"the service has ended it ({ended.why}; {told})")


def standing_on(session: Session) -> list[Link]:
    """Return the links that are attributes of a session."""
    found = [session.asking, session.queued, session.telling]
    if session.lease is not None and not session.lease.is_over:
        found.append(session.lease.link)
    return [link for link in found if link is not None]


def some_weather(rng: Random) -> Weather:
    """Return weather in which about half of what can go wrong does."""
    weather = Weather()
    for each in fields(Weather):
        if rng.random() < 0.4:
            setattr(weather, each.name, getattr(MOST, each.name) * rng.choice((0.2, 1.0, 2.0)))
    if rng.random() < 0.1:
        weather.lie = 0.2
    return weather
