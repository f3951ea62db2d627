"""The judge of a simulated world: what must never be, and what is to be in the end."""

from __future__ import annotations

import bisect
from typing import Any

from dflockd.shards import get_shard_id
from tests.dflockd.cluster.simulation.client import Client
from tests.dflockd.cluster.simulation.machines import KINDS, Key, ViolationError
from tests.dflockd.cluster.simulation.server import ServerProcess

BACK = 5.0
"""How long after the last server has started every shard is to be served."""

CLOCKS = 0.98
"""A window by the clock of one server may be this much of one by the clock of another."""


class Judge:
    """Looks at what clients believe and at what servers serve."""

    def believe(self, client: Client, key: Key, fence: int, until: float) -> None:
        """A client takes itself for a holder until then, unless it says that it is not any more."""
        if until <= self.time:
            return  # it was stopped since it looked at its clock, and looks again before it acts
        former = self._beliefs.get(client)
        self._beliefs[client] = key, fence, until
        holders = [
            other for other, (k, _, end) in self._beliefs.items() if k == key and end > self.time
        ]
        if len(holders) > key.limit:
            others = " and ".join(sorted(other.name for other in holders))
            raise self.violation(f"{others} hold {key.name.decode()} at a time")
        if former is not None and former[:2] == (key, fence):
            return
        latest, holder = self._fences.get(key, (0, None))
        if (fence, client) == (latest, holder):
            return  # it was in doubt
        self.counts["grants"] += 1
        self.granted[client.name] = self.time
        self.log(client.name, "holds %s, fence ...%x", key.name, fence & 0xFFFFFFFFFFFFF)
        if key.limit == 1 and fence <= latest:
            raise self.violation(f"fence {fence:x} of {key.name.decode()} has not grown")
        if fence > latest:
            self._fences[key] = fence, client

    def forget(self, client: Client) -> None:
        self._beliefs.pop(client, None)

    def begin(self, client: Client, key: Key, time: float) -> None:
        """A run begins; in no window, wherever it starts, may more have begun than the rate says."""
        self.counts["begun"] += 1
        self.log(client.name, "begins")
        runs, window = self.rates[key]
        begun = self._begun.setdefault(key, [])
        bisect.insort(begun, time)
        for first, last in zip(begun, begun[runs:], strict=False):
            if last - first < window / 1000 * CLOCKS:
                raise self.violation(
                    f"{runs + 1} runs of {key.name.decode()} began within {last - first:.3f} s, "
                    f"and {runs} may in {window / 1000:g} s"
                )

    def forget_ages(self, shard: int) -> None:
        """A server has begun anew: older ones that come may be granted a lock."""
        for key in list(self.newest):
            if get_shard_id(key.name, self.parameters.num_shards) == shard:
                del self.newest[key]

    def judge_servers(self, process: ServerProcess) -> None:
        """No two servers may serve one shard at a time."""
        able = process.able()
        for other in self.running():
            if able and other is not process and (both := able & other.able()):
                raise self.violation(f"{process.name} and {other.name} both serve shards {both}")

    def _judge_return(self, started: float) -> None:
        """Some time after all have been stopped and started, nobody is to wait any more."""
        if self._disturbed_at < started:
            served = {shard for process in self.running() for shard in process.grants()}
            if missing := set(range(self.parameters.num_shards)) - served:
                raise self.violation(f"{BACK:g} s after the last start nobody serves {missing}")

    def _unrest(self) -> str:
        """Return what is still to come once the faults are over."""
        for client in self.clients.values():
            if not client.done:
                return f"{client.name} got no lock"
        for process in self.running():
            counts = process.node.counts()
            if counts.total() != counts["serving"]:
                return f"{process.name} has not come to rest: {dict(counts)}"
        served = sorted(shard for process in self.running() for shard in process.grants())
        if served != list(range(self.parameters.num_shards)):
            return f"only the shards {served} are served"
        return ""

    def log(self, who: str, text: str, *args: Any) -> None:
        self._trace.append((self.time, who, text, args))

    def timeline(self) -> str:
        return "\n".join(
            f"{time:8.3f}  {who:5} {text % args if args else text}"
            for time, who, text, args in self._trace
        )

    def violation(self, what: str) -> ViolationError:
        option = "".join(f"--{kind} " for kind in KINDS if getattr(self.rules, kind))
        return ViolationError(
            f"{what}\n\n{self.timeline()}\n{self.time:8.3f}  {what}\n\n"
            f"replay: python -m tests.dflockd.cluster.simulation {option}{self.seed}"
        )
