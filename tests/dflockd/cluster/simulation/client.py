"""A client that keeps to the rules for clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflockd.wire import (
    Acquire,
    Aged,
    DrawAge,
    Enqueue,
    Enqueued,
    FairGroup,
    Granted,
    How,
    Moved,
    Next,
    Owner,
    Pass,
    Queued,
    Recovering,
    Release,
    Renew,
    Renewed,
    Reply,
    Request,
    Reserve,
    Status,
    TimedOut,
    Unbegun,
    Wait,
    YourTurn,
    fence_from_token,
)
from tests.dflockd.cluster.simulation.asking import Answer, Asking, Life
from tests.dflockd.cluster.simulation.machines import PATIENCE, Clock, Connection, Key

if TYPE_CHECKING:
    from tests.dflockd.cluster.simulation.world import World


class Client(Asking):
    """Takes locks, keeps them for a while and gives them back, by the rules for clients."""

    timeouts: tuple[float, ...] = (0, 1, 3, 8)
    """In seconds."""

    def __init__(
        self, world: World, name: str, clock: Clock, errand: Callable[[Client], Life] | None = None
    ) -> None:
        super().__init__(world, name, clock)
        self.now = 0.0
        self.done = False
        self.owners: dict[int, tuple[str, int]] = {}
        self.ages: dict[Key, list[int]] = {}
        """With which it has asked for each key."""
        self.instance = b""
        """That of connections that want turns."""
        self._owner: Owner | None = None
        self._group: FairGroup | None = None
        self._connection: Connection | None = None
        self._old: list[Connection] = []
        self._life = (errand or Client._live)(self)
        self._until = math.inf
        world.after(0, self.receive, self._begin)

    # How it is driven.

    def _begin(self, now: float) -> None:
        self.now = now
        self._until = next(self._life)
        self.wake_at(self._until)

    def heard(self, now: float, connection: Connection, reply: Reply | None) -> None:
        if reply is None and connection is self._connection:
            self._connection = None
            connection.closed = True
        self._resume(now, (connection, reply))

    def due(self, now: float) -> None:
        if now >= self._until:
            self._resume(now, None)
        elif self._until < math.inf:
            self.wake_at(self._until)

    def _resume(self, now: float, event: tuple[Connection, Reply | None] | None) -> None:
        self.now = now
        try:
            self._until = self._life.send(event)
        except StopIteration:
            self._until = math.inf
            self.done = True
        else:
            self.wake_at(self._until)

    def kill(self) -> None:
        super().kill()
        self.world.forget(self)
        for connection in [*self._old, *filter(None, [self._connection])]:
            connection.close(clean=False)

    def remember(self, shard: int, server: str) -> None:
        """Take a server to be in charge of a shard."""
        self.owners[shard] = server, 0

    # What it does.

    def _live(self) -> Life:
        rng = self.world.random
        leases = [lease for lease in (1, 2, 3, 4, 8) if lease <= self.world.parameters.max_lease]
        while not self.world.calm:
            yield from self._sleep(rng.uniform(0, 1))
            key = rng.choice(self.world.keys)
            yield from self._use(key, rng.choice(self.timeouts), rng.choice(leases))
        for key in self.world.keys:
            # The last round: everyone gets everything once more.
            while not (yield from self._use(key, 30, 2)):
                yield from self._sleep(0.1)

    def _sleep(self, seconds: float) -> Life:
        until = self.now + seconds
        while self.now < until:
            yield until

    def _use(self, key: Key, timeout: float, lease: int) -> Life:
        """Take a lock once; return whether it was granted."""
        rng = self.world.random
        take = self._enqueue if rng.random() < 0.3 else self.acquire
        if self.world.rules.wants_turns and rng.random() < 0.7:
            take = self._by_turn
        if self.world.rules.groups:
            # These only have their turns when they are granted something.
            take, self._group = self.acquire, FairGroup(rng.choice((b"a", b"a", b"b", b"c")))
        hold = rng.choice((0.1, 0.5, 3, 9) if not self.world.calm else (0.2,))
        if self.world.rules.ages and key.limit == 1 and not (yield from self._age(key)):
            return False
        granted = yield from self.use(take, key, timeout, lease, hold)
        self._owner = None
        return granted

    def _age(self, key: Key) -> Life:
        """Be new, or somebody of before once more; return whether it is known who."""
        rng, former = self.world.random, self.ages.setdefault(key, [])
        if not former or self.world.calm or rng.random() < 0.6:
            answer = yield from self._ask_on(key, DrawAge(key.name), self.now + PATIENCE)
            if answer is None or not isinstance(answer.reply, Aged):
                self._hang_up()
                return False
            former.append(answer.reply.age)
        name = f"{self.name}/{next(self.world.numbers)}".encode()
        self._owner = Owner(name, 0, rng.choice(former[-3:]))
        if self.world.calm:
            self._owner = self._owner._replace(age=former[-1])
        return True

    def use(
        self,
        take: Callable[[Key, float, int], Life],
        key: Key,
        timeout: float,
        lease: int,
        hold: float,
    ) -> Life:
        """Take a lock in some way and keep it for so long; return whether it was granted."""
        answer = yield from take(key, timeout, lease)
        if answer is None:
            self._hang_up()
            return False
        token = answer.reply.token
        if answer.received - answer.sent > lease * 0.25:
            answer = yield from self._confirm(key, token, lease)
            if answer is None or not isinstance(answer.reply, Renewed):
                self._hang_up()
                return False
        deadline = self._deadline(answer, lease)
        if self.now >= deadline:
            self._hang_up()
            return False
        if key in self.world.rates:
            if self.world.chance(0.1):
                yield from self._ask_on(key, Unbegun(key.name, token), deadline)
                self._hang_up()
                return False
            self.world.begin(self, key, self.clock.true(self.now))
        self.world.believe(self, key, fence_from_token(token), self.clock.true(deadline))
        yield from self._hold(key, token, lease, answer.sent, deadline, self.now + hold)
        self._hang_up()
        return True

    def _confirm(self, key: Key, token: bytes, lease: int) -> Life:
        """Find out whether a grant that took its time still counts."""
        how = How.PLAIN if self.world.rules.confirms_by_renewal else How.CONFIRM
        return (yield from self._ask_on(key, Renew(*key[:2], token, lease, how), self.now + lease))

    def _hold(
        self, key: Key, token: bytes, lease: int, sent: float, deadline: float, until: float
    ) -> Life:
        # Who does not say so has begun when the hold ends, for all that the server knows.
        says_so = key in self.world.rates and not self.world.chance(0.2)
        while True:
            how = How.BEGUN if says_so else How.PLAIN
            yield from self._sleep(0 if says_so else min(until, sent + lease / 2) - self.now)
            says_so = False
            if self.now >= deadline:
                self.world.log(self.name, "knows that its lease of %s has ended", key.name)
                self.world.counts["leases ended"] += 1
                self.world.forget(self)
                return
            if self.now >= until:
                break
            request = Renew(*key[:2], token, lease, how)
            answer = yield from self._ask_on(key, request, deadline)
            if answer is None or self.now >= deadline:
                self.world.counts["leases ended"] += 1
                self.world.forget(self)
                return
            if not isinstance(answer.reply, Renewed):
                raise self.world.violation(
                    f"{self.name} renewed {key.name.decode()} in time, and was told {answer.reply}"
                )
            sent, deadline = answer.sent, self._deadline(answer, lease)
            if self.now >= deadline:
                continue
            self.world.counts["renewals"] += 1
            self.world.believe(self, key, fence_from_token(token), self.clock.true(deadline))
        self.world.forget(self)
        self.world.log(self.name, "releases %s", key.name)
        yield from self._ask_on(key, Release(*key[:2], token), deadline)

    def _deadline(self, answer: Answer, lease: int) -> float:
        from_answer = self.world.rules.counts_from_answer
        return (answer.received if from_answer else answer.sent) + lease

    def _said(self, key: Key) -> tuple[Any, ...]:
        """Return what is said of a key and of who asks: the fields from `rate` to `group`."""
        return self.world.rates.get(key), self._owner, b"", self._group

    def acquire(self, key: Key, timeout: float, lease: int, ticket: bytes = b"") -> Life:
        until, progress = self.now + timeout, [ticket]

        def begin() -> Request:
            left = max(0, math.ceil(until - self.now))
            return Acquire(*key, left, lease, *self._said(key), progress[0])

        answer = yield from self._pursue(key, begin, until, progress)
        return answer if answer is not None and isinstance(answer.reply, Granted) else None

    def _enqueue(self, key: Key, timeout: float, lease: int) -> Life:
        until, progress = self.now + timeout, [b""]

        def begin() -> Request:
            return Enqueue(*key, lease, *self._said(key), progress[0])

        rng, keeps = self.world.random, self.world.rules.keeps_places
        while True:
            answer = yield from self._pursue(key, begin, until, progress)
            if answer is None or answer.reply is Status.ALREADY_ENQUEUED:
                return None
            if isinstance(answer.reply, Enqueued):
                return answer
            yield from self._sleep(self.world.random.choice((0, 0.3)))
            connection = self._connection
            if connection is None or answer.reply is not Status.QUEUED:
                return None
            while True:
                left = max(0, math.ceil(until - self.now))
                waiting = Wait(*key[:2], left)
                if keeps:
                    reserve = Reserve(*rng.choice(((0, 1000), (500, 500), (2000, 100))))
                    waiting = Wait(*key[:2], min(left, rng.choice((0, 1))), reserve)
                answer = yield from self._ask(connection, waiting, left + PATIENCE)
                if answer is None or not isinstance(answer.reply, Recovering) or not left:
                    break
                yield from self._sleep(0.1)
            if answer is not None and isinstance(answer.reply, TimedOut) and self.now < until:
                progress[0] = answer.reply.ticket
                yield from self._sleep(rng.choice((0, 0.5, 2)))
                continue
            if answer is None or not isinstance(answer.reply, Moved):
                return answer if answer is not None and isinstance(answer.reply, Granted) else None
            progress[0] = answer.reply.ticket
            self._learn(answer.reply)

    def _by_turn(self, key: Key, timeout: float, lease: int) -> Life:
        """Ask whose turn it is, and take the lock on another connection once there is time."""
        rng, until, progress = self.world.random, self.now + timeout, [b""]
        turn = rng.choice((100, 1000, 3000))
        self.instance = b"%b/%d" % (self.name.encode(), rng.randrange(1 << 60))

        def begin() -> Request:
            return Enqueue(*key, lease, *self._said(key), progress[0], turn)

        while True:
            answer = yield from self._pursue(key, begin, until, progress)
            if answer is not None and isinstance(answer.reply, Granted | Enqueued):
                raise self.world.violation(f"{self.name} was to be told, and has {answer.reply}")
            if answer is None or not isinstance(answer.reply, Queued):
                return None
            progress[0] = answer.reply.ticket
            waiting, self._connection = self._connection, None
            assert waiting is not None
            self._old.append(waiting)  # it stays open, and its position with it
            left = max(1, math.ceil(until - self.now))
            self.outbox.append((waiting.send, (Wait(*key[:2], left),)))
            if (yield from self._hear_of_turn(key, waiting, until)):
                break
            if self.now >= until:
                return None
            # If the position is still somewhere, it is taken up by its ticket.
        yield from self._sleep(0 if self.world.calm else rng.choice((0, 0, 0.3, 2)))
        return (yield from self.acquire(key, max(1.0, until - self.now), lease, progress[0]))

    def _hear_of_turn(self, key: Key, waiting: Connection, until: float) -> Life:
        """Ask whose turn it is where somebody waits; return whether it can be used.

        A turn may be passed on before, and asked for again.
        """
        rng = self.world.random
        while self.now < until:
            asking = Connection(self, waiting.server)
            self._old.append(asking)
            self.outbox.append((asking.send, (Next(),)))
            heard_by, event = self.now + rng.choice((1, 4, 30)), None
            while self.now < heard_by and (event is None or event[0] not in (asking, waiting)):
                event = yield heard_by
            told = event[1] if event is not None else None
            if event is not None and event[0] is waiting and isinstance(told, Moved):
                self._learn(told)
            if not isinstance(told, YourTurn):
                return False
            self.world.counts["told"] += 1
            if self.world.calm or rng.random() < 0.6:
                return True
            if rng.random() < 0.5:
                self.outbox.append((asking.send, (Pass(key.name, told.ticket),)))
            yield from self._sleep(rng.choice((0, 0.5, 4)))
        return False
