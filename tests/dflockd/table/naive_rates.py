"""The rules of rates, written down a second time in the plainest way: a list of times for each key."""

from __future__ import annotations

from dataclasses import dataclass, field

Name = tuple[int, bytes]

LATE = 0.01
"""Seconds by which a place may be free later than it could."""


@dataclass
class NaiveRate:
    """How many runs of a key may begin in a window, and all that ever have."""

    runs: int
    window: float
    granted: set[bytes] = field(default_factory=set)
    """The tokens of those who may begin at any time."""
    begun: list[float] = field(default_factory=list)
    closed_until: float = 0.0

    def free(self, now: float) -> int:
        if now < self.closed_until:
            return 0
        counted = [time for time in self.begun if time + self.window > now]
        return self.runs - len(self.granted) - len(counted)

    def begin(self, token: bytes, now: float) -> None:
        if token in self.granted:
            self.granted.remove(token)
            self.begun.append(now)

    def check(self) -> None:
        """In no window, wherever it lies, have more runs begun than may."""
        for first, last in zip(self.begun, self.begun[self.runs :], strict=False):
            assert last - first >= self.window, (first, last, self.runs, self.window)


@dataclass
class NaiveHold:
    name: Name
    peer: int
    deadline: float


@dataclass
class NaiveRates:
    """Holds, queues and rates of some keys, all of whose users name the same rate."""

    limits: dict[Name, int]
    rates: dict[Name, NaiveRate]
    lease: float
    now: float = 0.0
    holds: dict[bytes, NaiveHold] = field(default_factory=dict)
    queues: dict[Name, list[int]] = field(default_factory=dict)

    def held(self, name: Name) -> int:
        return sum(hold.name == name for hold in self.holds.values())

    def may_be_granted(self, name: Name, now: float) -> bool:
        return self.held(name) < self.limits[name] and self.rates[name].free(now) > 0

    def grant(self, name: Name, peer: int, token: bytes) -> None:
        assert self.may_be_granted(name, self.now), (name, self.now)
        self.holds[token] = NaiveHold(name, peer, self.now + self.lease)
        self.rates[name].granted.add(token)

    def begin(self, token: bytes) -> None:
        hold = self.holds[token]
        self.rates[hold.name].begin(token, self.now)
        hold.deadline = self.now + self.lease

    def end(self, token: bytes, *, has_begun: bool = True) -> None:
        """A hold ends: if nothing was said, its run may have begun until now."""
        name = self.holds.pop(token).name
        if has_begun:
            self.rates[name].begin(token, self.now)
        else:
            self.rates[name].granted.discard(token)

    def lapse(self) -> None:
        for token in [
            token for token, hold in self.holds.items() if hold.deadline <= self.now + 1e-9
        ]:
            self.end(token)

    def leave(self, peer: int) -> None:
        for token in [token for token, hold in self.holds.items() if hold.peer == peer]:
            self.end(token)
        for queue in self.queues.values():
            if peer in queue:
                queue.remove(peer)

    def check(self) -> None:
        for name, rate in self.rates.items():
            rate.check()
            # A moment later than it could: nobody waits for what is there for them.
            waits = bool(self.queues.get(name))
            assert not (waits and self.may_be_granted(name, self.now - LATE)), (name, self.now)
