"""The shards that are one server's, each from its claim on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from dflockd.cluster.view import SHARDS, View
from dflockd.shards import Put, RevisionIs, ShardRecord, format_shard_value
from dflockd.table import Effect, ShardTable


class Stage(Enum):
    """How far a server is with a shard."""

    CLAIMING = "claiming"
    SERVING = "serving"
    LEAVING = "leaving"
    """Frozen: it is being handed over, or has been, for all that is known."""
    SUSPENDED = "suspended"
    """Frozen: the server was taken for dead, and the shard may be another's."""


@dataclass(eq=False)
class Tenure:
    """One server's time with one shard, from its claim on. No two of a shard have one epoch."""

    shard: int
    epoch: int
    former: ShardRecord
    """The record before the claim, or before the first of several that were not answered."""
    former_claimed: float
    """When the claim of the server before was first known."""
    record: ShardRecord
    """What its latest transaction is to make of the record."""
    compared: int
    """The revision that its latest transaction is to find."""
    stage: Stage = Stage.CLAIMING
    under_way: bool = True
    """Whether a transaction is under way."""
    clean: bool = False
    """Whether `parts` are all that the next server needs."""
    parts: Sequence[bytes] = ()
    """What is handed over, each as much as a transaction takes."""
    unwritten: int = 0
    """How many of them must be written before the one that goes with the record."""


class Tenures:
    """The tenures of the server at `address`, what it knows of their records, and their locks.

    Attributes:
        effects: what the table wants done.
        idle: peers whose connections must be closed: all that they hold is elsewhere now.
    """

    def __init__(self, address: str, view: View, table: ShardTable) -> None:
        self.address = address
        self.view = view
        self.table = table
        self.effects: list[Effect] = []
        self.idle: set[int] = set()
        self._tenures: dict[int, Tenure] = {}

    def __len__(self) -> int:
        return len(self._tenures)

    def __iter__(self) -> Iterator[Tenure]:
        """Yield the tenures; they may be dropped meanwhile."""
        return iter(list(self._tenures.values()))

    def __getitem__(self, shard: int) -> Tenure:
        return self._tenures[shard]

    def get(self, shard: int) -> Tenure | None:
        """Return the tenure of a shard, if it is this server's."""
        return self._tenures.get(shard)

    def add(self, tenure: Tenure) -> None:
        """Begin a tenure."""
        self._tenures[tenure.shard] = tenure

    def counts(self) -> Counter[str]:
        """Return how many there are in each stage."""
        return Counter(tenure.stage.value for tenure in self._tenures.values())

    def has(self, tenure: Tenure) -> bool:
        """Whether this very tenure goes on."""
        return self._tenures.get(tenure.shard) is tenure

    def is_mine(self, tenure: Tenure) -> bool:
        """Whether nobody else has taken the shard over since, for all that is known."""
        shard = tenure.shard
        is_here = self.view.records[shard].current == self.address
        return is_here and self.view.epochs[shard] == tenure.epoch

    def suspend(self) -> None:
        """Freeze all shards: this server was taken for dead."""
        for tenure in self:
            if tenure.stage is Stage.CLAIMING:
                self.forget(tenure)
            else:
                tenure.stage = Stage.SUSPENDED
                self.table.partitions[tenure.shard].frozen = True

    def thaw(self, tenure: Tenure, now: float) -> None:
        """Serve a shard again."""
        tenure.stage = Stage.SERVING
        self.effects.extend(self.table.thaw(tenure.shard, now))

    def forget(self, tenure: Tenure) -> None:
        """Drop a shard that is another's by now."""
        shard = tenure.shard
        del self._tenures[shard]
        if tenure.stage is not Stage.CLAIMING:
            refusal = self.view.refer(shard, self.address)
            effects, idle = self.table.drop(shard, refusal)
            self.effects.extend(effects)
            self.idle.update(idle)

    # What is said to the store about shards.

    def unchanged(self, shard: int) -> RevisionIs:
        """Return the condition that a record is still as it was seen."""
        return RevisionIs(self.view.key(SHARDS, shard), self.view.revisions[shard])

    def put(self, shard: int, record: ShardRecord) -> Put:
        """Return the operation that writes a record."""
        return Put(self.view.key(SHARDS, shard), format_shard_value(record).encode())
