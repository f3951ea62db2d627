"""Which server of a cluster is in charge of a key, and where to ask next when one refuses.

Pure: nothing here connects, sleeps or reads a clock. A `Path` says what to do next and is told what
came of it and what time it is; `follow` functions beside the pools walk it, one blocking, one for
asyncio. (Redis Cluster's clients follow such redirections as well: its specification, "MOVED
redirection"; here a whole shard moves at once, so there is no ASK.)
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Generator, Iterator
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, NamedTuple, Never, TypeAlias

from dflockd import errors
from dflockd.address import Address, Seeds, parse_server
from dflockd.client.operations import GRACE, PING_PATIENCE, SHARDS_PATIENCE, ShardReport

RETRY_PAUSES = (0.0, 0.05, 0.1, 0.2)
"""Seconds between attempts to reach a server again; the last one repeats."""

MAX_HOPS = 5
"""From server to server in a row without a pause: two that are not of one mind may go on for long."""

SHORTEST_RETRY, LONGEST_RETRY = 0.01, 0.5
"""Bounds in seconds of the pause that a server asks for: it may be ready, or gone, before."""

JITTER = 0.25
"""Pauses are longer by up to this share, so that those who were refused together do not come so."""

RECHECK = 4
"""After so many answers in a row that it is not ready, others are asked whether it still is the one:
a server that is cut off from them does not know."""

RELOAD_EVERY = 0.5
"""Seconds for which one map is good enough for all of a process that look for a lost server."""

LOAD_TURN, LOAD_LOOK = 0.1, 0.01
"""Seconds for which all of a process leave it to one of them to load the map, and how often they
look. Not for longer: the server that is asked may be silent, and they may ask another one."""

LOOK_EVERY = 5.0
"""Seconds between looks whether a server is alive at which somebody waits for a lock."""

LOOK_AGAIN = 1.0
"""Seconds to the next look at one that says nothing, and that nobody has replaced yet."""

ASKED_AT_LEAST = 3
"""The number of servers to ask for the map even if the time is over, while one after the other does
not answer. Otherwise a client that tries once would always ask the one that is gone."""

DENIED = 2.0
"""Seconds for which a server that is in charge of a shard may not know it yet."""

SETTLED = 1.0
"""Seconds after which an answer has nothing to do with the refusals before it."""

PASSING = (
    errors.UnreachableError,
    errors.DrainingError,
    errors.RecoveringError,
    errors.MovedError,
)
"""Errors that have to do with where and when something was asked, not with what."""


@lru_cache(maxsize=4096)
def _shard_of(key: bytes, num_shards: int) -> int:
    # Here, for the package brings asyncio along: half of the import time of the blocking client.
    from dflockd.shards.ids import get_shard_id

    return get_shard_id(key, num_shards)


class _Owned(NamedTuple):
    """Whose a shard is, since which epoch."""

    by: Address | None
    epoch: int


class ShardMap:
    """What a process knows of one cluster: which server has which shard, and since which epoch.

    Plain data, so that it survives a fork, and without a lock: of two threads that change it at once
    one may undo what the other has learned, which costs that shard's next request a detour.

    Attributes:
        seeds: where it begins.
        servers: all servers, as far as known.
        report: what was said last about all shards; ``None`` before.
        loaded_at: monotonic time of the latest `update`, ``-inf`` before the first.
        loading_until: monotonic time until which nobody else need load it, for one does so.
        signs: when somebody last looked whether a server is alive, and whether it is; ``None`` while
            that is not known yet.
    """

    def __init__(self, seeds: Seeds) -> None:
        self.seeds = seeds
        self.servers: tuple[Address, ...] = ()
        self.report: ShardReport | None = None
        self.loaded_at = self.loading_until = float("-inf")
        self.signs: dict[Address, tuple[float, bool | None]] = {}
        self._newer: dict[int, _Owned] = {}
        """What is known of shards beyond the report."""
        self._denied: dict[int, tuple[int, float]] = {}
        """Shards that are not their server's, as that says; since which epoch and time."""
        self._source: Address = seeds[0]

    def owner_of(self, key: bytes) -> Address | None:
        """Return the server in charge of a key; ``None`` if that is not known, or nobody is."""
        report = self.report
        if report is None:
            return None
        shard = _shard_of(key, len(report.shards))
        newer = self._newer.get(shard)
        return _owned(report, shard).by if newer is None else newer.by

    def whom_to_ask(self, key: bytes) -> Address:
        """Return the server in charge, or else one that will know when there is one."""
        return self.owner_of(key) or self._source

    def learn(self, moved: errors.MovedError) -> bool:
        """Take in that a shard has moved; ``False`` if something newer is known already."""
        report, shard = self.report, moved.shard
        if report is not None and shard < len(report.shards):
            if moved.epoch < (self._newer.get(shard) or _owned(report, shard)).epoch:
                return False
            self._newer[shard] = _Owned(parse_server(moved.to), moved.epoch)
        return True

    def heed(self, moved: errors.MovedError, server: Address, now: float) -> bool:
        """Take in what a server says; ``False`` if something newer is known already.

        Where it is in charge itself, as far as known, it may not know that yet. If it goes on to say
        so, nothing newer is known: the store was restored from a backup, and the epochs with it.
        """
        if self.learn(moved):
            return True
        report, shard = self.report, moved.shard
        assert report is not None
        owner, epoch = self._newer.get(shard) or _owned(report, shard)
        if owner != server:
            return False
        known = self._denied.get(shard)
        if known is None or known[0] != epoch:
            known = self._denied[shard] = epoch, now
        if now < known[1] + DENIED:
            return False
        self._newer[shard] = _Owned(parse_server(moved.to), moved.epoch)
        return True

    def moved(self, key: bytes, server: Address) -> errors.MovedError | None:
        """Return what a server would answer about a key if it knew that it is in charge no more."""
        report = self.report
        if report is None:
            return None
        shard = _shard_of(key, len(report.shards))
        owner, epoch = self._newer.get(shard) or _owned(report, shard)
        if owner is None or owner == server:
            return None
        return errors.MovedError(
            f"lock {key.decode()!r} on {server}: the server says nothing, and {owner} is in charge "
            f"of its shard {shard} by now",
            shard=shard,
            epoch=epoch,
            to=str(owner),
            key=key.decode(),
            server=str(server),
        )

    def update(self, report: ShardReport, source: Address, now: float) -> None:
        """Take in what a server says about all shards, but where something newer is known."""
        servers, known = set(report.servers), self._known_beside(report)
        self._newer = {
            shard: owned
            for shard, owned in known.items()
            if owned.epoch > report.epochs[shard] and owned.by in servers
        }
        self.report = report
        self.servers, self._source, self.loaded_at = tuple(report.servers), source, now

    def _known_beside(self, report: ShardReport) -> dict[int, _Owned]:
        """Return what is known of shards and may be newer than that."""
        before = self.report
        if before is None or len(before.shards) != len(report.shards):
            return {}
        newer = self._newer.copy()  # others may learn meanwhile
        if report is before:
            return newer
        epochs = enumerate(zip(before.epochs, report.epochs, strict=True))
        return {shard: _owned(before, shard) for shard, (old, new) in epochs if old > new} | newer

    def sources(self, suspects: set[Address]) -> list[Address]:
        """Return whom to ask about all shards, in this order; suspects come last."""
        seeds = [seed for seed in self.seeds if seed not in self.servers]
        listed = random.sample(self.servers, len(self.servers)) + random.sample(seeds, len(seeds))
        return sorted(listed, key=suspects.__contains__)


def _owned(report: ShardReport, shard: int) -> _Owned:
    index = report.shards[shard]
    return _Owned(report.servers[index] if index >= 0 else None, report.epochs[shard])


_maps: dict[tuple[Any, ...], ShardMap] = {}


def shard_map(seeds: Seeds, secret: bytes | None, tls: ssl.SSLContext | None) -> ShardMap:
    """Return the map that all locks of this process share that reach a cluster in the same way."""
    return _maps.setdefault((seeds, secret, tls), ShardMap(seeds))


class Ask(NamedTuple):
    """Ask this server about the key, with so many seconds left to wait (``None``: no end)."""

    server: Address
    timeout: float | None


class Load(NamedTuple):
    """Ask this server which has which shard, for so many seconds."""

    server: Address
    known: ShardReport | None = None
    """What is known already, to be returned if the server says the same."""
    patience: float = SHARDS_PATIENCE


class SignOfLife(NamedTuple):
    """Ask this server for a sign of life, for so many seconds."""

    server: Address
    patience: float = PING_PATIENCE


class Pause(NamedTuple):
    """Wait."""

    seconds: float


class StepOutcome(NamedTuple):
    """What came of a step, when. An `Ask` that succeeds is the end of the path instead."""

    now: float
    error: errors.RemoteError | None = None
    report: ShardReport | None = None


Leg: TypeAlias = Ask | Load | SignOfLife | Pause
Path: TypeAlias = Generator[Leg, StepOutcome, Never]
"""The steps to an answer. It raises the last error when there is nothing else to be done."""

_Part: TypeAlias = Generator[Leg, StepOutcome, None]


def insist(server: Address, until: float, now: float) -> Path:
    """Ask one server again and again until its answer comes, or the time is over."""
    for pause in _pauses():
        outcome = yield Pause(min(pause, max(0.0, until - now)))
        outcome = yield Ask(server, None)
        assert outcome.error is not None
        now = outcome.now
        if now >= until:
            raise outcome.error
    raise AssertionError("there is always another pause")


def pursue(
    shards: ShardMap,
    key: bytes,
    until: float | None,
    now: float,
    *,
    first: Address | None = None,
    refusal: errors.RefusedError | None = None,
    insists: bool = False,
) -> Path:
    """Ask the server that is in charge of a key, wherever that is by now.

    `error_moved` is followed. A server that is not ready is asked again. If one is shutting down or
    cannot be reached, another is asked for the map. At the end of the time the last refusal is
    raised, because nobody has said that somebody else holds the lock. Without any time, hops are
    made and the map is loaded once, without a wait.

    Args:
        shards: the map, which learns.
        key: what is asked about.
        until: monotonic time at which it ends; ``None`` for never.
        now: monotonic time.
        first: whom to ask first, whatever the map says.
        refusal: what that server has said already.
        insists: go on until then even if no server can be reached, or one answers nonsense, and
            ask nobody any more then: it is about a lease. Else these errors are raised at once.
    """
    return _Pursuit(shards, key, until, now, insists).path(first, refusal)


def glance(
    shards: ShardMap,
    key: bytes,
    server: Address,
    is_waiting: bool,
    now: float,
    until: float | None = None,
) -> Path:
    """Look once at a server that has not answered yet: is it alive, is it still in charge?

    It ends with an `Ask`: the answer may still come, and its `timeout` says after how many seconds to
    look again. Or with a `MovedError`: others say that one of them is in charge.

    Args:
        shards: the map, which learns.
        key: what the server was asked about.
        server: it.
        is_waiting: whether it is right to say nothing as long as it is alive.
        now: monotonic time.
        until: when nobody waits for that answer any more: then nothing is left to be found out.
    """
    return _Pursuit(shards, key, until, now, insists=True).glance(server, is_waiting)


class _Pursuit:
    """The state of `pursue` and `glance`."""

    def __init__(
        self, shards: ShardMap, key: bytes, until: float | None, now: float, insists: bool
    ) -> None:
        self._map = shards
        self._key = key
        self._until = until
        self._now = now
        self._insists = insists
        self._error: errors.RemoteError | None = None
        """The last refusal."""
        self._suspects: set[Address] = set()
        self._reloads = 0
        self._calm()

    def path(self, server: Address | None, error: errors.RemoteError | None) -> Path:
        if server is None:
            if not self._map.servers:
                yield from self._load()
            server = self._map.whom_to_ask(self._key)
        self._server, asked = server, self._now
        while True:
            if error is None:
                if self._error is not None and (self._insists or self._is_late()):
                    self._check_time()  # it is a holder whose lease has ended, or has asked for long
                asked = self._now
                error = (yield from self._do(Ask(self._server, self._left()))).error
                assert error is not None
            self._error = error
            if self._now - asked > SETTLED:
                self._calm()
            if isinstance(error, errors.MovedError) and self._map.heed(
                error, self._server, self._now
            ):
                yield from self._hop(error)
            elif isinstance(error, errors.RecoveringError):
                yield from self._stay(error)
            elif self._insists or isinstance(error, PASSING):
                yield from self._look_elsewhere(asked)
            else:
                raise error
            error = None

    def glance(self, server: Address, is_waiting: bool) -> Path:
        is_alive = (yield from self._sign_of_life(server)) if is_waiting else False
        if is_alive is False:
            self._suspects.add(server)
            if self._now - self._map.loaded_at > RELOAD_EVERY and not self._is_over():
                yield from self._ask_around(but=server)
            if (moved := self._map.moved(self._key, server)) is not None:
                raise moved
        yield Ask(server, LOOK_EVERY if is_alive else LOOK_AGAIN)
        raise AssertionError("it is the end of the path")

    def _sign_of_life(self, server: Address) -> Generator[Leg, StepOutcome, bool | None]:
        """Ask for one, unless another of this process has done so, or is about to."""
        looked_at, is_alive = self._map.signs.get(server, (float("-inf"), None))
        if self._now - looked_at < (LOOK_EVERY / 2 if is_alive else LOOK_AGAIN):
            return is_alive
        self._map.signs[server] = self._now, None
        left = self._left()
        patience = PING_PATIENCE if left is None else min(PING_PATIENCE, left)
        is_alive = (yield from self._do(SignOfLife(server, patience))).error is None
        self._map.signs[server] = self._now, is_alive
        return is_alive

    def _calm(self) -> None:
        self._hops = self._refusals = 0
        self._pauses = _pauses()

    def _hop(self, moved: errors.MovedError) -> _Part:
        self._hops += 1
        if self._hops > MAX_HOPS:
            yield from self._pause(next(self._pauses))
        self._server = parse_server(moved.to)

    def _stay(self, error: errors.RecoveringError) -> _Part:
        self._refusals += 1
        yield from self._pause(min(max(error.retry_s, SHORTEST_RETRY), LONGEST_RETRY))
        if self._refusals % RECHECK == 0 and self._now - self._map.loaded_at > RELOAD_EVERY:
            self._suspects = {self._server}
            if (yield from self._ask_around()) is None:
                self._server = self._map.whom_to_ask(self._key)

    def _look_elsewhere(self, asked: float) -> _Part:
        self._suspects.add(self._server)
        # Others of this process may have done so meanwhile.
        good_since = self._now - RELOAD_EVERY if self._reloads else asked
        if self._map.loaded_at < good_since:
            if self._reloads:
                self._check_time()
            yield from self._load()
        server = self._map.whom_to_ask(self._key)
        if server in self._suspects:
            yield from self._pause(next(self._pauses))
            self._suspects.clear()
        self._server = server

    def _load(self) -> _Part:
        """Load the map.

        Raises:
            UnreachableError: no server can be reached.
            RemoteError: the time is over, or one answered what it will answer again.
        """
        while (error := (yield from self._ask_around())) is not None:
            if isinstance(error, errors.UnreachableError) and not self._insists:
                if self._error is not None:
                    self._check_time()  # not all may have been asked
                raise errors.UnreachableError(
                    f"no server of {self._map.seeds} can be reached: {error}",
                    key=self._key.decode(),
                    server=str(self._map.seeds),
                ) from error
            self._error = self._error or error
            yield from self._pause(next(self._pauses))

    def _ask_around(
        self, but: Address | None = None
    ) -> Generator[Leg, StepOutcome, errors.RemoteError | None]:
        """Ask one server after another for the map; return why none could answer.

        Args:
            but: who is not asked: it is looked at, and few of the others will do.
        """
        if (yield from self._leave_to_others()):
            self._reloads += 1
            return None
        self._map.loading_until = self._now + LOAD_TURN
        try:
            return (yield from self._ask_in_turn(but))
        finally:
            self._map.loading_until = self._now

    def _ask_in_turn(
        self, but: Address | None
    ) -> Generator[Leg, StepOutcome, errors.RemoteError | None]:
        over = None
        if but is not None:
            over = self._now
        elif self._until is not None and not self._insists:
            over = self._until + GRACE
        refusals: list[errors.RemoteError] = []
        sources = [each for each in self._map.sources(self._suspects) if each != but]
        for server in sources:
            patience = SHARDS_PATIENCE
            if over is not None:
                if self._now >= over and len(refusals) >= ASKED_AT_LEAST:
                    break
                if but is not None and self._is_over():
                    break
                # Each of the few that must be asked has its share.
                share = max(1, min(ASKED_AT_LEAST, len(sources)) - len(refusals))
                patience = min(patience, max(0.0, over - self._now) / share)
            load = Load(server, self._map.report, patience)
            _, error, report = yield from self._do(load)
            if report is not None:
                self._map.update(report, server, self._now)
                self._reloads += 1
                return None
            assert error is not None
            if not (self._insists or isinstance(error, PASSING)):
                raise error
            refusals.append(error)
        # What one that can be reached has said is worth more.
        return min(
            refusals,
            key=lambda error: isinstance(error, errors.UnreachableError),
            default=errors.UnreachableError("there is no other server to ask"),
        )

    def _leave_to_others(self) -> Generator[Leg, StepOutcome, bool]:
        """Return whether others of this process have loaded the map while they were waited for."""
        began = self._now
        until = began + LOAD_TURN
        if self._until is not None:
            until = min(until, self._until)
        while self._now < min(until, self._map.loading_until):
            yield from self._do(Pause(min(LOAD_LOOK, until - self._now)))
            if self._map.loaded_at >= began:
                return True
        return False

    def _pause(self, seconds: float) -> _Part:
        self._check_time()
        left = self._left()
        seconds *= random.uniform(1, 1 + JITTER)
        yield from self._do(Pause(seconds if left is None else min(seconds, left)))

    def _do(self, step: Leg) -> Generator[Leg, StepOutcome, StepOutcome]:
        outcome = yield step
        self._now = outcome.now
        return outcome

    def _is_over(self) -> bool:
        return self._until is not None and self._now >= self._until

    def _is_late(self) -> bool:
        return self._until is not None and self._now >= self._until + GRACE

    def _check_time(self) -> None:
        if self._is_over():
            assert self._error is not None
            raise self._error

    def _left(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - self._now)


def _pauses() -> Iterator[float]:
    return chain(RETRY_PAUSES, repeat(RETRY_PAUSES[-1]))
