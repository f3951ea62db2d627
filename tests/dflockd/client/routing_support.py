"""A cluster that is made up, and what its servers say."""

from __future__ import annotations

from typing import Any

from dflockd import errors
from dflockd.address import Address, Seeds, parse_servers
from dflockd.client.operations import ShardReport
from dflockd.client.routing import Leg, Path, ShardMap, StepOutcome, pursue
from dflockd.client.steps import Pause
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


class Walk:
    """A path that is walked by hand."""

    def __init__(self, path: Path, now: float = NOW) -> None:
        self.now = now
        self._path = path
        self.step: Leg = next(path)

    def __call__(
        self,
        error: errors.RemoteError | None = None,
        *,
        report: ShardReport | None = None,
        after: float = 0.0,
    ) -> Leg:
        """Say what came of the step, and return the next."""
        self.now += after or (self.step.seconds if isinstance(self.step, Pause) else 0.0)
        self.step = self._path.send(StepOutcome(self.now, error, report))
        return self.step


def walk(shards: ShardMap, timeout: float | None = 10, **options: Any) -> Walk:
    until = None if timeout is None else NOW + timeout
    return Walk(pursue(shards, KEY, until, NOW, **options))
