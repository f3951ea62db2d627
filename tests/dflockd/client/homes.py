"""A process of the client in the simulation: its tasks, pool and reactor, watched."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from dflockd.client.connection import Connection, Route
from dflockd.client.flow import Flow, Hear, Pause, Ready, Signal
from dflockd.client.lease import Lease
from dflockd.client.pool import Pool
from dflockd.client.release import Ends, end_later
from dflockd.client.renewal import keep, read_now, renew_now
from dflockd.client.session import LockSession

if TYPE_CHECKING:
    from tests.dflockd.client.stage import Stage

stages: list[Stage] = []
"""Those that run, the last of them innermost."""


class Task:
    """A flow under way, of an owner or of the reactor."""

    def __init__(
        self,
        home: Home,
        flow: Flow[Any],
        *,
        session: LockSession | None = None,
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
        self._flow = flow
        self._order = 0
        self._wait: Any = None
        self._number = -1
        """The descriptor that this waits for, ..."""
        self.watched: Any = None
        """... and the connection whose it was when that was registered. It is until something else is
        waited for, as with an event loop or the reactor."""

    def step(self, outcome: object) -> None:
        if self.ended:
            return
        self._order += 1
        self.steps += 1
        before, self.stage.current = self.stage.current, self
        try:
            wait = self._flow.send(outcome)
        except StopIteration as stop:
            self._end(stop.value, None)
        except BaseException as exc:
            self._end(None, exc)
        else:
            self._wait_for(wait)
        finally:
            self.stage.current = before

    def resume(self, came: bool) -> None:
        """As that of a `dflockd.client.lease.Keeping`."""
        self.step(came)

    def interrupt(self) -> None:
        """Do what drivers do when a signal handler raises, or a task is cancelled."""
        if not self.ended:
            before, self.stage.current = self.stage.current, self
            try:
                self._flow.close()
                self._end(None, KeyboardInterrupt())
            finally:
                self.stage.current = before

    def is_gone(self) -> bool:
        """As that of a `dflockd.client.connection.Watcher`."""
        return self.ended

    def _watch(self, link: Any) -> bool:
        if link is self.watched:
            return True
        self._unwatch()
        number = link.fileno()
        if not link.watch(self):
            return False
        self.watched, self._number = link, number
        return True

    def _unwatch(self) -> None:
        link, self.watched = self.watched, None
        if link is not None:
            link.unwatch(self)

    @property
    def _is_readable(self) -> bool:
        """Whether a poller says so, which knows a number alone."""
        wire = self.stage.descriptors.get(self._number)
        return wire is not None and wire.is_readable

    def _end(self, result: object, error: BaseException | None) -> None:
        self.ended = True
        self._unwatch()
        self.home.tasks.discard(self)
        if self._done is not None:
            self._done(result, error)
        elif error is not None:
            self.stage.wrong("the reactor's flows raise nothing", repr(error))
        self.stage.look_at_links_of(self)
        # Events that will never come about it must not keep a session alive.
        self.session, self._done, self._wait = None, None, None
        del self._flow

    def _wait_for(self, wait: Any) -> None:
        self._wait = wait
        if isinstance(wait, Connection):
            wait = self._wait = Ready(wait, False, self.stage.now + wait.left)
        if not isinstance(wait, Ready):
            self._unwatch()
        if isinstance(wait, Pause):
            self._wake(None, wait.seconds)
        elif isinstance(wait, Hear):
            wait.signal.listen(self._woken(True))
            self._wake_at(False, wait.until)
        else:
            assert isinstance(wait, Ready), wait
            if not self._watch(wait.link) or wait.writes or self._is_readable:
                self._wake(True, 0.0)
            else:
                self.stage.descriptors[self._number].listen(self._woken(True))
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
            if isinstance(self._wait, Ready) and self._is_readable:
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

    def take(self, route: Route) -> Connection | None:
        link = super().take(route)
        if link is not None:
            link.wire.user = self._home.stage.current  # type: ignore[attr-defined]
        return link

    def give(self, link: Connection, since: float | None = None) -> None:
        if any(link is each for each in self.idle):
            self._home.stage.wrong("every link given back once", f"{link} again")
        super().give(link, since)


class FakeReactor:
    """What the reactor does, as tasks among the others."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._stage = home.stage

    def keep(self, lease: Lease) -> None:
        wait = min(self._stage.rng.uniform(0.1, 0.2), lease.lease * lease.renew_ratio)
        self._stage.at(self._stage.now + wait, lambda: self._run(partial(self._look_after, lease)))

    def renew(self, lease: Lease) -> None:
        self._stage.soon(lambda: self._run(partial(renew_now, lease, self._look_after)), 0.05)

    def read(self, lease: Lease, seen: Signal) -> None:
        self._stage.soon(lambda: self._run(partial(read_now, lease, self._look_after, seen)), 0.05)

    def _run(self, job: Callable[[], object]) -> None:
        """Do something in the reactor's thread, once that runs."""
        if self._stage.now < self._home.stalled_until:
            self._stage.at(self._home.stalled_until, lambda: self._run(job))
        else:
            job()

    def _look_after(self, lease: Lease) -> None:
        if not lease.is_over and lease.task is None:
            lease.task = self._home.run(keep(lease, self._home.pool))

    def forget(self, lease: Lease) -> None:
        if lease.task is not None:
            self._stage.soon(lease.poke, 1.0)

    def end_later(self, lease: Lease, operation: Ends) -> None:
        flow = end_later(lease, self._home.pool, operation)
        self._stage.soon(lambda: self._home.run(flow), 0.01)

    def cannot_be_awaited(self) -> bool:
        current = self._stage.current
        return current is not None and current.session is None


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


class WatchedSession(LockSession):
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
        self.stage = stages[-1]
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
