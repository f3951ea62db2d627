"""A cluster that is made up, and what its servers say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from dflockd import clock, errors
from dflockd.address import Address, Seeds, parse_servers
from dflockd.client.flow import Flow, Pause
from dflockd.client.operations import ShardReport, ping
from dflockd.client.routing import Pursuit, ShardMap, follow
from dflockd.shards import get_shard_id

NUM_SHARDS = 16

A, B, C = (Address(name, 6388) for name in "abc")

KEY = b"account:7"

SHARD = get_shard_id(KEY, NUM_SHARDS)

NOW = 1000.0


def seeds(*addresses: Address) -> Seeds:
    parsed = parse_servers("cluster://" + ",".join(map(str, addresses)))
    assert isinstance(parsed, Seeds)
    return parsed


def report(owner: Address | None, epoch: int = 7, servers: tuple[Address, ...] = (A, B, C)) -> Any:
    index = -1 if owner is None else servers.index(owner)
    return ShardReport(servers, [index] * NUM_SHARDS, [epoch] * NUM_SHARDS)


def known(owner: Address | None = A, epoch: int = 7, at: float = NOW - 100) -> ShardMap:
    shards = ShardMap(seeds(A, B, C))
    shards.update(report(owner, epoch), A, at)
    return shards


def moved(to: Address, epoch: int = 8) -> errors.MovedError:
    return errors.MovedError("moved", shard=SHARD, epoch=epoch, to=str(to))


def recovering(retry_s: float = 0.1) -> errors.RecoveringError:
    return errors.RecoveringError("recovering", retry_s=retry_s)


GONE = errors.UnreachableError("gone")

DRAINING = errors.DrainingError("draining")


class Ask(NamedTuple):
    """Somebody asks this server about the key, with so many seconds left to wait."""

    server: Address
    timeout: float | None


class Load(NamedTuple):
    """A pursuit asks this server for the map, for so many seconds."""

    server: Address
    patience: float


class SignOfLife(NamedTuple):
    """A pursuit asks this server for a sign of life, for so many seconds."""

    server: Address
    patience: float


def asks(server: Address, operation: Any, patience: float) -> Flow[Any]:
    step = (SignOfLife if operation is ping else Load)(server, patience)
    return (yield step)  # type: ignore[misc]


def attempt(server: Address, timeout: float | None) -> Flow[Any]:
    return (yield Ask(server, timeout))  # type: ignore[misc]


class Walk:
    """A flow of routing that is walked by hand."""

    def __init__(self, begin: Callable[[], Flow[Any]], now: float = NOW) -> None:
        self.now = now
        self.step: Any = None
        self.result: Any = None
        with self.time():
            self._flow = begin()
        self._go(lambda: self._flow.send(None))

    def __call__(
        self,
        error: errors.RemoteError | None = None,
        *,
        report: ShardReport | None = None,
        after: float = 0.0,
    ) -> Any:
        """Say what came of the step, and return the next; ``None`` at the end."""
        self.now += after or (self.step.seconds if isinstance(self.step, Pause) else 0.0)
        if error is None:
            return self._go(lambda: self._flow.send(report))
        return self._go(lambda: self._flow.throw(error))

    def _go(self, step: Callable[[], Any]) -> Any:
        with self.time():
            try:
                self.step = step()
            except StopIteration as stop:
                self.step, self.result = None, stop.value
        return self.step

    def time(self) -> Any:
        return mock.patch.object(clock, "now", return_value=self.now)


def walk(shards: ShardMap | None, timeout: float | None = 10, **options: Any) -> Walk:
    until = None if timeout is None else NOW + timeout
    return Walk(lambda: follow(Pursuit(shards, KEY, until, asks, **options), attempt))


def glance(shards: ShardMap, *, is_waiting: bool = True) -> Walk:
    """Look at A, which says nothing."""
    return Walk(lambda: Pursuit(shards, KEY, None, asks, insists=True).glance(A, is_waiting))
