"""Which server of a cluster is in charge of a key, and where to ask next when one refuses.

A `Pursuit` gives one server after the other until one answers; what it asks servers about themselves
it leaves to who is given to it. (Redis Cluster's clients follow such redirections as well: its
specification, "MOVED redirection"; here a whole shard moves at once, so there is no ASK.)
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeAlias, TypeVar

from dflockd import clock, errors
from dflockd.address import Address, Seeds, parse_server
from dflockd.client.flow import Flow, Pause
from dflockd.client.frames import without_frames
from dflockd.client.operations import (
    GRACE,
    PING_PATIENCE,
    SHARDS_PATIENCE,
    ShardReport,
    ping,
    shards,
)

RETRY_PAUSES = (0.0, 0.05, 0.1, 0.2)
"""Seconds between attempts to reach a server again; the last one repeats."""

MAX_HOPS = 5
"""From server to server in a row without a pause: two that are not of one mind may go on for long."""

SHORTEST_RETRY, LONGEST_RETRY = 0.01, 0.5
"""Bounds in seconds of the pause that a server asks for: it may be ready, or gone, before."""

PAUSE_JITTER = 0.25
"""Pauses are longer by up to this share, so that those who were refused together do not come so."""

RECHECK = 4
"""After so many answers in a row that it is not ready, others are asked whether it still is the one:
a server that is cut off from them does not know."""

RELOAD_EVERY = 0.5
"""Seconds for which one map is good enough for all of a process that look for a lost server."""

LOAD_TURN, LOAD_LOOK = 0.1, 0.01
"""Seconds for which all of a process leave it to one of them to load the map, and how often they
look. Not for longer: the server that is asked may be silent, and they may ask another one."""

SIGN_EVERY = 5.0
"""Seconds between looks whether a server is alive at which somebody waits for a lock."""

LOOK_AGAIN = 1.0
"""Seconds to the next look at one that says nothing, and that nobody has replaced yet."""

ASKED_AT_LEAST = 3
"""The number of servers to ask for the map even if the time is over, while one after the other does
not answer. Otherwise a client that tries once would always ask the one that is gone. One will do if
all of the time went to a server that says nothing: the next call asks another."""

DENIED = 2.0
"""Seconds for which a server that is in charge of a shard may not know it yet."""

SETTLED = 1.0
"""Seconds after which an answer has nothing to do with the refusals before it."""

ELSEWHERE = (errors.DrainingError, errors.RecoveringError, errors.MovedError)
"""Refusals that have to do with where and when something was asked, not with what. They put nothing in
doubt: nobody is granted a lock before its holder's lease has ended."""

RETRIED = (errors.UnreachableError, *ELSEWHERE)
"""Errors after which the same is asked again, or of another server."""


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
        loaded_at: when the latest `update` came, ``-inf`` before the first.
        loading_until: until when nobody else need load it, for one does so.
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

    def check(self, key: bytes, server: Address) -> None:
        """Return if a server is still in charge of a key, as far as known.

        Raises:
            MovedError: what it would answer if it knew that it is not.
        """
        report = self.report
        if report is None:
            return
        shard = _shard_of(key, len(report.shards))
        owner, epoch = self._newer.get(shard) or _owned(report, shard)
        if owner is None or owner == server:
            return
        raise errors.MovedError(
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


MOST_CONTEXTS = 4
"""TLS contexts whose maps of one cluster are kept."""

_maps: dict[tuple[Any, ...], ShardMap] = {}


def shard_map(seeds: Seeds, secret: bytes | None, tls: ssl.SSLContext | None) -> ShardMap:
    """Return the map that all locks of this process share that reach a cluster in the same way.

    A program that makes a TLS context for each lock never uses one again.
    """
    if (seeds, secret, tls) not in _maps:
        alike = [each for each in list(_maps) if each[:2] == (seeds, secret)]
        for each in alike[: max(0, len(alike) - MOST_CONTEXTS + 1)]:
            _maps.pop(each, None)
    return _maps.setdefault((seeds, secret, tls), ShardMap(seeds))


R = TypeVar("R")

Asks: TypeAlias = Callable[[Address, Any, float], Flow[Any]]
"""Runs an operation at a server that is about that server, for so many seconds."""


def pause(seconds: float) -> Flow[None]:
    """Wait."""
    yield Pause(seconds)


def follow(pursuit: Pursuit, attempt: Callable[[Address, float | None], Flow[R]]) -> Flow[R]:
    """Ask the servers that a pursuit gives until one answers.

    Args:
        pursuit: names the server to ask next, and ends the search.
        attempt: asks a server, with so many seconds left to wait (``None``: no end).

    Raises:
        RemoteError: the pursuit has come to its end.
    """
    while True:
        server = yield from pursuit.next()
        try:
            return (yield from attempt(server, pursuit.left))
        except errors.RemoteError as exc:
            # What is done about it is no context of this error, nor this of other errors.
            pursuit.refused(exc)


class Pursuit:
    """Asks the server that is in charge of a key, wherever that is by now.

    `error_moved` is followed. A server that is not ready is asked again. If one is shutting down or
    cannot be reached, another is asked for the map. At the end of the time the last refusal is
    raised, because nobody has said that somebody else holds the lock. Without any time, hops are
    made and the map is loaded once, without a wait.

    Args:
        shards: the map, which learns; ``None`` without a cluster: `first` is asked again, once if
            this does not insist.
        key: what is asked about.
        until: when it ends; ``None`` for never.
        asks: what servers are asked about themselves with.
        first: whom to ask first, whatever the map says.
        refusal: what that server has said already.
        insists: go on until then even if no server can be reached, or one answers nonsense, and
            ask nobody any more then: it is about a lease. Else these errors are raised at once.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        shards: ShardMap | None,
        key: bytes,
        until: float | None,
        asks: Asks,
        *,
        first: Address | None = None,
        refusal: errors.RemoteError | None = None,
        insists: bool = False,
        pause: Callable[[float], Flow[None]] = pause,
    ) -> None:
        self._shards = shards
        self._key = key
        self._until = until
        self._asks = asks
        self._server = first
        self._insists = insists
        self._wait = pause
        self._asked = clock.now()
        """When the latest server was given."""
        self._error = refusal
        """The last refusal. Without the frames that it came through, and nowhere else once it is
        raised: see `dflockd.client.frames`."""
        self._suspects: set[Address] = set()
        self._reloads = 0
        self._calm()

    @property
    def left(self) -> float | None:
        """Seconds to its end; ``None`` if there is none."""
        return None if self._until is None else max(0.0, self._until - clock.now())

    def next(self) -> Flow[Address]:
        """Return whom to ask next.

        Raises:
            RemoteError: there is nobody: the last refusal is the last word.
        """
        if self._error is not None:
            yield from self._go_on()
        elif self._server is None:
            if not self._map.servers:
                yield from self._load()
            self._server = self._map.whom_to_ask(self._key)
        self._asked = clock.now()
        assert self._server is not None
        return self._server

    def refused(self, error: errors.RemoteError) -> None:
        """Take in what the server said that was given last."""
        self._error = without_frames(error)

    def glance(self, server: Address, is_waiting: bool) -> Flow[float]:
        """Look at a server that has not answered yet: is it alive, is it still in charge?

        Nothing is left to be found out once the time is over, for nobody waits for the answer any more.

        Args:
            server: the server that has not answered.
            is_waiting: whether it is right to say nothing as long as it is alive.

        Returns:
            After how many seconds to look again: the answer may still come.

        Raises:
            MovedError: others say that one of them is in charge.
        """
        is_alive = (yield from self._is_alive(server)) if is_waiting else False
        if is_alive is False:
            self._suspects.add(server)
            if not self._is_over() and self._is_old():
                yield from self._ask_around(but=server)
            self._map.check(self._key, server)
        return SIGN_EVERY if is_alive else LOOK_AGAIN

    @property
    def _map(self) -> ShardMap:
        assert self._shards is not None
        return self._shards

    def _go_on(self) -> Flow[None]:
        """Turn to the next server after a refusal."""
        assert self._server is not None
        now = clock.now()
        if now - self._asked > SETTLED:
            self._calm()
        error = self._error
        try:
            if self._shards is None:
                yield from self._repeat(isinstance(error, errors.UnreachableError))
            elif isinstance(error, errors.MovedError) and self._shards.heed(
                error, self._server, now
            ):
                yield from self._hop(parse_server(error.to))
            elif isinstance(error, errors.RecoveringError):
                yield from self._stay(error.retry_s)
            elif self._insists or isinstance(error, RETRIED):
                yield from self._look_elsewhere()
            else:
                raise self._last_word()
            if self._insists or self._is_late():
                self._check_time()  # it is a holder whose lease has ended, or has asked for long
        finally:
            error = None  # it may be raised from here

    def _is_alive(self, server: Address) -> Flow[bool | None]:
        """Ask for a sign of life, unless another of this process has done so, or is about to."""
        signs, now = self._map.signs, clock.now()
        looked_at, is_alive = signs.get(server, (float("-inf"), None))
        if now - looked_at < (SIGN_EVERY / 2 if is_alive else LOOK_AGAIN):
            return is_alive
        signs[server] = now, None
        left = self.left
        patience = PING_PATIENCE if left is None else min(PING_PATIENCE, left)
        try:
            yield from self._asks(server, ping, patience)
        except errors.RemoteError:
            is_alive = False
        else:
            is_alive = True
        signs[server] = clock.now(), is_alive
        return is_alive

    def _calm(self) -> None:
        self._hops = self._refusals = 0
        self._pauses = _pauses()

    def _repeat(self, may_pass: bool) -> Flow[None]:
        """Turn to the same server again, which there is no other for."""
        if not self._insists and (self._hops or not may_pass):
            raise self._last_word()
        self._hops += 1
        yield from self._pause(next(self._pauses))

    def _hop(self, to: Address) -> Flow[None]:
        self._hops += 1
        if self._hops > MAX_HOPS:
            yield from self._pause(next(self._pauses))
        self._server = to

    def _stay(self, retry_s: float) -> Flow[None]:
        assert self._server is not None
        self._refusals += 1
        yield from self._pause(min(max(retry_s, SHORTEST_RETRY), LONGEST_RETRY))
        if self._refusals % RECHECK == 0 and self._is_old():
            self._suspects = {self._server}
            if (yield from self._ask_around()) is None:
                self._server = self._map.whom_to_ask(self._key)

    def _look_elsewhere(self) -> Flow[None]:
        assert self._server is not None
        self._suspects.add(self._server)
        # Others of this process may have done so meanwhile.
        good_since = clock.now() - RELOAD_EVERY if self._reloads else self._asked
        if self._map.loaded_at < good_since:
            if self._reloads:
                self._check_time()
            yield from self._load()
        server = self._map.whom_to_ask(self._key)
        if server in self._suspects:
            yield from self._pause(next(self._pauses))
            self._suspects.clear()
        self._server = server

    def _load(self) -> Flow[None]:
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
            del error  # which may be raised from here
            yield from self._pause(next(self._pauses))

    def _ask_around(self, but: Address | None = None) -> Flow[errors.RemoteError | None]:
        """Ask one server after another for the map; return why none could answer.

        Args:
            but: a server that is not asked: it is looked at, and few of the others will do.
        """
        if (yield from self._leave_to_others()):
            self._reloads += 1
            return None
        self._map.loading_until = clock.now() + LOAD_TURN
        try:
            return (yield from self._ask_in_turn(but))
        finally:
            self._map.loading_until = clock.now()

    def _ask_in_turn(self, but: Address | None) -> Flow[errors.RemoteError | None]:
        over = None
        if but is not None:
            over = clock.now()
        elif self._until is not None and not self._insists:
            over = self._until + GRACE
        least = ASKED_AT_LEAST
        if but is None and over is not None and clock.now() >= over:
            least = 1
        refusals: list[errors.RemoteError] = []
        sources = [each for each in self._map.sources(self._suspects) if each != but]
        for server in sources:
            patience, now = SHARDS_PATIENCE, clock.now()
            if over is not None:
                if now >= over and len(refusals) >= least:
                    break
                if but is not None and self._is_over():
                    break
                # Each of the few that must be asked has its share.
                share = max(1, min(least, len(sources)) - len(refusals))
                patience = min(patience, max(0.0, over - now) / share)
            loading = partial(shards, known=self._map.report)
            try:
                report: ShardReport = yield from self._asks(server, loading, patience)
            except errors.RemoteError as exc:
                if not (self._insists or isinstance(exc, RETRIED)):
                    raise
                refusals.append(without_frames(exc))
            else:
                self._map.update(report, server, clock.now())
                self._reloads += 1
                return None
        # What one that can be reached has said is worth more.
        return min(
            refusals,
            key=lambda error: isinstance(error, errors.UnreachableError),
            default=errors.UnreachableError("there is no other server to ask"),
        )

    def _leave_to_others(self) -> Flow[bool]:
        """Return whether others of this process have loaded the map while they were waited for."""
        began = clock.now()
        until = began + LOAD_TURN
        if self._until is not None:
            until = min(until, self._until)
        while (now := clock.now()) < min(until, self._map.loading_until):
            yield from self._wait(min(LOAD_LOOK, until - now))
            if self._map.loaded_at >= began:
                return True
        return False

    def _pause(self, seconds: float) -> Flow[None]:
        self._check_time()
        left = self.left
        if (
            self._shards is not None
        ):  # else one finds out for all: see `dflockd.client.release.Turn`
            seconds *= random.uniform(1, 1 + PAUSE_JITTER)
        yield from self._wait(seconds if left is None else min(seconds, left))

    def _is_old(self) -> bool:
        """Whether the map is."""
        return clock.now() - self._map.loaded_at > RELOAD_EVERY

    def _is_over(self) -> bool:
        return self._until is not None and clock.now() >= self._until

    def _is_late(self) -> bool:
        return self._until is not None and clock.now() >= self._until + GRACE

    def _check_time(self) -> None:
        if self._is_over():
            raise self._last_word()

    def _last_word(self) -> errors.RemoteError:
        error, self._error = self._error, None
        assert error is not None
        return error


def _pauses() -> Iterator[float]:
    return chain(RETRY_PAUSES, repeat(RETRY_PAUSES[-1]))
