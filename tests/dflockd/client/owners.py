"""Those who use sessions on a `stage`, as the faces of locks do, and judge what each call returns."""

from __future__ import annotations

import math
from random import Random
from typing import Any, cast

from dflockd import errors
from dflockd.client import operations
from dflockd.client.connection import Route
from dflockd.client.conversation import Heard
from dflockd.client.flow import Flow, Ready
from dflockd.client.frames import without_frames
from dflockd.client.introduction import Introduction
from dflockd.client.operations import GRACE, Progress, Target
from dflockd.client.plan import Plan
from dflockd.client.routing import ShardMap
from dflockd.client.session import ANSWER_PATIENCE, RELEASE_PATIENCE
from dflockd.wire import Reserve, Space, UnexpectedReplyError, format_token
from tests.dflockd.client.homes import Home, Task, WatchedSession
from tests.dflockd.client.service import KEY
from tests.dflockd.client.stage import Stage, standing_on

TIMEOUTS = (0, 0, 0.3, 1, 2.5, 5, 20)
LEASES = (1, 2, 5, 10)
CONNECTING = 2.0
"""Seconds that a call may take beside its time and `GRACE`: each step has half a second in any case."""

CLAIMS = ("acquire", "enqueue", "line_up", "adopt")
FREE = (*CLAIMS, "acquire", "acquire", "acquire", "question", "check", "renew", "release", "wait")
QUEUED = ("wait", "wait", "wait", "release", "acquire", "drop")
STAYING = ("stay", "stay", "stay", "pass_on", "release", "acquire", "drop")
HELD = ("release", "release", "release", "renew", "check", "check", "detach", "question", "rest")
HELD += ("rest", "rest", "drop", "acquire")
TELLING = ("release", "renew", "detach")
WHERE = {"free": FREE, "lost": FREE, "queued": QUEUED, "held": HELD, "doubtful": HELD}


def _remembering(target: Target, route: Route) -> Plan:
    """Return a plan, of which a session uses no more than what it remembers."""
    return Plan(cast(Any, None), target, route)


class Owner:
    """Somebody with one session at a time, who does this and that with it.

    Args:
        stage: where.
        home: the process.
        rudeness: how likely it is that a call is interrupted, or another begun beside it.
    """

    def __init__(self, stage: Stage, home: Home, rudeness: float) -> None:
        self.stage = stage
        self.home = home
        self.rng: Random = stage.rng
        self.rudeness = rudeness
        self.calls: list[Call] = []
        self.retired = False
        self.came_for_turns = False
        self.session = self._new()
        stage.soon(self.act, 1.0)

    def act(self) -> None:
        """Do something, and later something else."""
        if self.retired:
            return
        rng, state = self.rng, self.session.state
        if not self.calls:
            stays = state == "queued" and self.came_for_turns
            self._begin(rng.choice(STAYING if stays else WHERE[state]))
        elif rng.random() < self.rudeness:
            what = rng.choice((*FREE, *QUEUED, *HELD, "cancel", "interrupt"))
            if what == "interrupt":
                rng.choice(self.calls).task.interrupt()
            elif what == "cancel" or self._may_be_beside_others(what):
                self._begin(what)
        self.stage.soon(self.act, rng.choice((0.05, 0.5, 4.0)))

    def _may_be_beside_others(self, what: str) -> bool:
        """What is held is for one at a time, except that anybody may ask whether it is held."""
        if what in TELLING:
            return not any(call.what in (*TELLING, "stay") for call in self.calls)
        if what == "wait":
            return not any(call.what == "stay" for call in self.calls)
        return what != "drop"

    def retire(self) -> None:
        """Stop, in one way or another."""
        self.retired = True
        while self.calls:
            self.calls[0].task.interrupt()
        if self.session.is_cancelled or self.rng.random() < 0.3:
            self.session.abandon()
        elif self.rng.random() < 0.5:
            self._drop()
        else:
            self._begin("release")

    def _new(self) -> WatchedSession:
        stage, home = self.stage, self.home
        number = self.rng.randrange(len(stage.addresses))
        shards = None
        if stage.service.is_cluster:
            # One map for each process.
            shards = home.__dict__.setdefault("shards", ShardMap(tuple(stage.addresses)))
        address = stage.addresses[number]
        label = self.rng.choice((b"", b"me", b"you"))
        target = Target(
            Space.LOCK, KEY, 1, self.rng.choice(LEASES), str(address), Introduction(label)
        )
        route = Route(address)
        WatchedSession.stage = stage
        session = WatchedSession(
            target,
            route,
            0.5,
            shards,
            lambda: home,  # type: ignore[arg-type,return-value]
            None,
            None if stage.service.is_cluster else _remembering(target, route),
        )
        stage.sessions.append(session)
        return session

    def _drop(self) -> None:
        """Forget the session; it must let go."""
        wires = [link.wire for link in standing_on(self.session)]  # type: ignore[attr-defined]
        self.session.is_watched = False
        self.stage.sessions.remove(self.session)
        self.session = self._new()
        for wire in wires:
            if not wire.has_ended:
                self.stage.wrong("a forgotten session lets go", f"{wire} is open")

    def _begin(self, what: str) -> None:
        if what == "drop":
            self._drop()
        elif what == "cancel":
            self.session.cancel()
        elif what != "rest":
            Call(self, what).begin()
        if self.session.is_cancelled and not self.calls:
            self.session.abandon()
            self._drop()


class Call:
    """One call of a session's flow, with what a face does around it."""

    def __init__(self, owner: Owner, what: str) -> None:
        self.owner = owner
        self.what = what
        self.stage = owner.stage
        self.session = owner.session
        self.claim = object()
        is_wait = what == "wait"
        self.ending = None if is_wait else owner.session.lease, owner.session.waiter
        self.timeout: float | None = owner.rng.choice(TIMEOUTS)
        self.began = self.stage.now
        self.was = self.session.state
        self.was_owned = bool(self.session._owner) and self.was != "lost"
        self.left = 0.0 if self.session.lease is None else self.session.lease.left
        self.was_disturbed = False
        """Whether another call has abandoned what this one asks for."""
        self.task: Task

    def begin(self) -> None:
        self.owner.calls.append(self)
        flow: Flow[Any] = getattr(self, f"_{self.what}")()
        # `run` takes the first steps: what is heard is that of this task.
        self.task = Task(self.owner.home, flow, session=self.session, done=self._done)
        self.owner.home.tasks.add(self.task)
        self.task.step(None)
        rng, rudeness = self.owner.rng, self.owner.rudeness
        if not self.task.ended and (self.timeout is None or rng.random() < rudeness / 2):
            self.stage.soon(self.task.interrupt, rng.choice((0.1, 1.0, 10.0)))

    # What it calls.

    def _acquire(self) -> Flow[bool]:
        if self.owner.rng.random() < 0.1:
            self.timeout = None
        return self._ask()

    def _ask(self) -> Flow[bool]:
        """Acquire as locks do: by straight calls, and by a flow what these have not come to."""
        session, rng = self.session, self.owner.rng
        progress = None
        if rng.random() < 0.2:
            progress = self._progress((session.ticket or "").encode(), Reserve(2000, 0))
        link = session.ask(self.claim, self.timeout, progress=progress)
        reply = None
        if link is not None:
            reply = yield from self._heard(link, session.patience)
            if type(reply) is bytes and session.is_granted(self.claim, link, reply):
                return True
        return (yield from session.acquire(self.claim, self.timeout, link, reply, progress))

    def _hand_back(self) -> Flow[bool]:
        session = self.session
        link = session.hand_back(self.ending)
        reply = None
        if link is not None:
            reply = yield from self._heard(link, RELEASE_PATIENCE)
            if type(reply) is bytes and session.is_released(link, reply):
                return True
        return (yield from session.release(self.ending, link, reply))

    def _heard(self, link: Any, patience: float | None) -> Flow[Heard]:
        try:
            until = math.inf if patience is None else self.stage.now + patience
            return link.receive() if (yield Ready(link, False, until)) else None
        except (OSError, UnexpectedReplyError) as exc:
            return without_frames(exc)
        except BaseException:
            link.close()
            raise

    def _enqueue(self) -> Flow[bool]:
        self.owner.came_for_turns &= self.was_owned
        ticket = (self.session.ticket or "").encode()
        if self.stage.tickets and self.owner.rng.random() < 0.5:
            ticket = self.stage.tickets.pop()
        progress = self._progress(ticket) if ticket else None
        return self.session.enqueue(self.claim, self.timeout, progress=progress)

    def _line_up(self) -> Flow[bytes]:
        self.timeout = 0
        self.owner.came_for_turns |= not self.was_owned
        return self.session.line_up(self.claim, self._progress(), 500)

    def _stay(self) -> Flow[bool]:
        keep = Reserve(2000, 0) if self.owner.rng.random() < 0.3 else None
        return self.session.stay(self.owner.rng.choice((0, 1, 3)), self._progress(keep=keep))

    def _pass_on(self) -> Flow[None]:
        rng = self.owner.rng
        route = Route(rng.choice(self.stage.addresses))
        return self.session.pass_on(route, b"t%d" % rng.randrange(100))

    def _wait(self) -> Flow[bool]:
        keep = Reserve(2000, 0) if self.owner.rng.random() < 0.3 else None
        progress = self._progress(keep=keep)
        return self.session.wait(self.ending, self.timeout, progress)

    def _adopt(self) -> Flow[bool]:
        self.timeout = ANSWER_PATIENCE
        unknown = [*self.stage.service.ended, format_token(1 << 50, b"unknown")]
        detached = self.stage.detached
        is_unknown = not detached or self.was_owned or self.owner.rng.random() < 0.3
        # One is for one only: who has a token can take the lock from whoever has it.
        token = self.owner.rng.choice(unknown) if is_unknown else detached.pop()
        return self.session.adopt(self.claim, token)

    def _release(self) -> Flow[bool]:
        return self._hand_back()

    def _renew(self) -> Flow[bool]:
        return self.session.renew(self.owner.rng.choice((None, *LEASES)))

    def _check(self) -> Flow[None]:
        return self.session.check()

    def _detach(self) -> Flow[str | None]:
        return self.session.detach(self.ending, self.owner.rng.choice((None, *LEASES)))

    def _question(self) -> Flow[Any]:
        return self.session.question(operations.inspect)

    def _progress(self, place: bytes = b"", keep: Reserve | None = None) -> Progress:
        return Progress(place, keep=keep)

    # What came of it.

    def _done(self, result: Any, error: BaseException | None) -> None:
        self.owner.calls.remove(self)
        task: Task = self.owner.stage.current  # type: ignore[assignment]
        if error is not None:
            self._let_go(error)
        self._judge_error(task, error)
        if error is None:
            self._judge_result(task, result)
        self._judge_time()

    def _let_go(self, error: BaseException) -> None:
        if self.what == "stay":
            self.session.abandon()
        elif self.what in CLAIMS:
            self.session.let_go(self.claim)
        elif self.what == "detach":
            self.session.take_back(self.ending)
        elif self.what in ("wait", "release"):
            self.session.give_up(self.ending)
        else:
            return
        has_begun = not isinstance(error, errors.AlreadyHeldError | errors.NotEnqueuedError)
        if not has_begun or self._others() or self.was_disturbed:
            return
        if self.what == "detach" and self.session.lease is not None:
            return  # it had not begun either: it was waiting for the connection
        if standing_on(self.session) or self.session.state != "free":
            self._wrong(
                "who fails leaves nothing behind",
                f"it is {self.session.state} after {error!r}, on {standing_on(self.session)}",
            )

    def _judge_error(self, task: Task, error: BaseException | None) -> None:
        if isinstance(error, errors.AlreadyHeldError) != (self.what in CLAIMS and self.was_owned):
            self._wrong("one owner at a time", f"it was {self.was}: {error!r}")
        may_be: tuple[type[BaseException], ...] = (errors.RemoteError, KeyboardInterrupt)
        if self.what in CLAIMS:
            may_be += (errors.AlreadyHeldError,)
        if self.what == "wait":
            may_be += (errors.NotEnqueuedError,)
        if self.what == "check":
            may_be = (errors.LockLostError, KeyboardInterrupt)
        if self.session.is_cancelled or self.was_disturbed:
            may_be += (errors.AcquireCancelledError,)
        if error is not None and not isinstance(error, may_be):
            self._wrong("errors are of the tree", repr(error))

    def _judge_result(self, task: Task, result: Any) -> None:
        said = b"".join(task.lines)
        if self.what == "stay" and (b"error_not_enqueued" if result else b"timeout") not in said:
            self._wrong("the end of a position is what a server has said", f"it said {said!r}")
        if isinstance(result, bytes):
            self.stage.tickets.append(result)
            if b"queued " not in said or self.session.lease is not None:
                self._wrong("a position is what a server has said", f"it said {said!r}")
        if result is False and self.what in ("acquire", "wait"):
            # Who has a position was told so before, and is content with a sign of life.
            is_cut_off = self.what == "wait" and (
                self.timeout != int(self.timeout or 0) or self.stage.service.is_cluster
            )
            if not (said if is_cut_off else b"timeout" in said):
                self._wrong("False is what a server has said", f"it said {said!r}")
        if result is False and self.what == "adopt" and b"error" not in said:
            self._wrong("False is what a server has said", f"it said {said!r}")
        if result is True and self.what in (*CLAIMS, "wait"):
            if b"ok" not in said and b"acquired" not in said:
                self._wrong("True is what a server has said", f"it said {said!r}")
            if not self._others() and self.session.lease is None:
                self._wrong("True is what a server has said", "there is no lease")
        if self.what == "detach" and result:
            self.stage.detached.append(result.encode())
        if self.what == "check" and not (self.session.lease and self.session.lease.held):
            self._wrong("held is certain", f"check() returned, and it is {self.session.state}")
        if self.what == "release" and not self._others() and standing_on(self.session):
            self._wrong("who releases has nothing", f"{standing_on(self.session)}")

    def _judge_time(self) -> None:
        if self.owner.home.stalled_until >= self.began:
            return  # it was stopped itself
        took, bound = self.stage.now - self.began, None
        if self.what in (*CLAIMS, "wait") and self.timeout is not None:
            bound = self.timeout + GRACE + CONNECTING
        elif self.what == "check":
            # It may be renewed meanwhile, and come into doubt anew.
            lease = self.session.lease
            bound = max(self.left, lease.deadline - self.began if lease else 0.0) + 0.1
        elif self.what == "release":
            bound = 1.0 + CONNECTING + GRACE * self.stage.service.is_cluster
        elif self.what == "question":
            bound = ANSWER_PATIENCE + GRACE + CONNECTING
        elif self.what in ("renew", "detach"):
            # Who has waited for a rescue may find a lease that was just begun anew.
            bound = self.left + max(LEASES) + CONNECTING
        if bound is not None and took > bound:
            self._wrong("a time is kept", f"{took:.3f} s of {bound:.3f} s")

    def _others(self) -> bool:
        return any(call.session is self.session for call in self.owner.calls)

    def _wrong(self, rule: str, text: str) -> None:
        self.stage.wrong(rule, f"{self.what} ({self.timeout}): {text}")
