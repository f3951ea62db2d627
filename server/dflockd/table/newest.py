"""The newest of each key: whose age counts where of those who ask for a lock the newest wins.

An age is a number of the same counter as the fences, so that all that is said there of fences goes for
ages: a later one is larger, also after a restart and at the next server of a shard.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple, final

from dflockd.wire import Superseded

OLDEST: Final = 1
"""The age of who brings one that was not given out here: nobody knows what it is newer than."""

MOST_KEYS: Final = 100_000
"""Keys whose newest is remembered. Beyond them it is forgotten of the one asked for longest ago."""


class NewestRecord(NamedTuple):
    """What is kept of the newest of a key where it outlives the table."""

    key: bytes
    age: int
    label: bytes
    """Its label, for people."""


@final
class Newest:
    """The newest that has asked for a key. It never changes: the next one replaces it."""

    __slots__ = ("age", "here", "key", "label")

    def __init__(self, here: dict[bytes, Newest], record: NewestRecord) -> None:
        self.here = here
        """Those of its partition, by their keys."""
        self.key, self.age, self.label = record

    @property
    def ended(self) -> bool:
        """Whether it is remembered no more."""
        return self.here.get(self.key) is not self

    @property
    def answer(self) -> Superseded:
        """What those are told who are older."""
        return Superseded(self.age, self.label)

    def kept(self) -> NewestRecord:
        """Return what is worth keeping."""
        return NewestRecord(self.key, self.age, self.label)


@final
class NewestKeys:
    """The newest of all keys of a table, in bounded memory.

    Args:
        most: keys that are remembered.
    """

    def __init__(self, most: int = MOST_KEYS) -> None:
        self._most = most
        self._order: OrderedDict[Newest, None] = OrderedDict()
        """The one that asked longest ago comes first."""

    def __len__(self) -> int:
        """Return of how many keys the newest is remembered."""
        return len(self._order)

    def note(self, here: dict[bytes, Newest], record: NewestRecord) -> list[Newest]:
        """Remember the newest of a key; return what has come and what has gone by that."""
        changed = [Newest(here, record)]
        former = here.get(record.key)
        if former is not None:
            del self._order[former]
            changed.append(former)
        elif len(self._order) >= self._most:
            oldest, _ = self._order.popitem(last=False)
            del oldest.here[oldest.key]
            changed.append(oldest)
        here[record.key] = changed[0]
        self._order[changed[0]] = None
        return changed

    def asked(self, newest: Newest) -> None:
        """Note that somebody has asked for its key, older or of the same age."""
        self._order.move_to_end(newest)

    def drop(self, here: dict[bytes, Newest]) -> None:
        """Forget those of a partition that leaves."""
        for newest in here.values():
            del self._order[newest]
        here.clear()
