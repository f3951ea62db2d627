"""What the store says of one shard, as text and as a record.

The text is ``<target>,<current>[,f=<flag>...]``: the node that is to serve the shard, the node that
serves it, and flags. Flags that mean nothing here are kept, in their order.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from dflockd.errors import InvalidArgumentError
from dflockd.shards.errors import BadShardValueError

PINNED = "pinned"
"""The flag of a shard that no rebalancing and no update takes from its target."""

_FLAG = "f="
_EPOCH = "e:"
_CLEAN = "clean:"
_PARTS = "parts:"
_RECOVERS = "recovers:"

logger = logging.getLogger("dflockd.shards")


class ShardRecord(NamedTuple):
    """One shard: the server that should serve it, the one that does, and flags. Empty: none."""

    target: str = ""
    current: str = ""
    flags: tuple[str, ...] = ()

    @property
    def node(self) -> str:
        """Where to ask for the shard: the node that serves it, or else the one that is about to."""
        return self.current or self.target

    @property
    def moving(self) -> bool:
        """Whether one node serves the shard and another one is to."""
        return bool(self.current and self.target) and self.current != self.target

    @property
    def pinned(self) -> bool:
        """Whether the shard stays with its target, come what may."""
        return PINNED in self.flags

    @property
    def epoch(self) -> int:
        """How many times a node has taken the shard over: flag ``e:<number>``, without it 0.

        Raises:
            BadShardValueError: it is not a number. To take it for 0 would be to say that nobody can
                hold a lock.
        """
        return self._number(_EPOCH) or 0

    @property
    def clean(self) -> int | None:
        """The epoch whose locks its node has handed over whole, if it has: ``clean:<number>``.

        Raises:
            BadShardValueError: it is not a number.
        """
        return self._number(_CLEAN)

    @property
    def parts(self) -> int:
        """In how many parts locks are kept for the next node: flag ``parts:<number>``, without it 0.

        Raises:
            BadShardValueError: it is not a number.
        """
        return self._number(_PARTS) or 0

    @property
    def recovers(self) -> int:
        """Until when its node waits for holders of the one before: flag ``recovers:<number>``.

        In seconds since 1970, by the clock of that node: for people, and nothing else goes by it.
        Without the flag, or one that is not a number, it is 0.
        """
        try:
            return self._number(_RECOVERS) or 0
        except BadShardValueError:
            return 0

    def with_flag(self, flag: str) -> ShardRecord:
        """Return the record with this flag."""
        return self if flag in self.flags else self._replace(flags=(*self.flags, flag))

    def without_flag(self, flag: str) -> ShardRecord:
        """Return the record without this flag."""
        return self._replace(flags=tuple(f for f in self.flags if f != flag))

    def with_epoch(self, epoch: int) -> ShardRecord:
        """Return the record with this epoch instead."""
        return self._replace(flags=_with_number(self.flags, _EPOCH, epoch))

    def with_clean(self, epoch: int | None) -> ShardRecord:
        """Return the record that says, or with ``None`` does not say, that this epoch ended clean."""
        return self._replace(flags=_with_number(self.flags, _CLEAN, epoch))

    def with_parts(self, number: int) -> ShardRecord:
        """Return the record that says that locks are kept in so many parts."""
        return self._replace(flags=_with_number(self.flags, _PARTS, number or None))

    def with_recovers(self, until: int | None) -> ShardRecord:
        """Return the record that says, or with ``None`` does not say, until when holders have time."""
        return self._replace(flags=_with_number(self.flags, _RECOVERS, until))

    def _number(self, name: str) -> int | None:
        numbers = [flag.removeprefix(name) for flag in self.flags if flag.startswith(name)]
        if not numbers:
            return None
        # int() alone would take '1_0' and ' 1', and refuse thousands of digits in its own words.
        if not all(text.isascii() and text.isdigit() and len(text) < 19 for text in numbers):
            raise BadShardValueError(
                f"a shard has the flags {','.join(self.flags)!r}: {name!r} must be followed by "
                "a number"
            )
        return max(map(int, numbers))


def parse_shard_value(value: str | bytes) -> ShardRecord:
    """Make a record of what the store has.

    White space around parts does not count, flags may stand anywhere and empty ones are dropped; the
    first part that is no flag is the target, the second the current node. Both may be empty or
    absent. More parts are ignored, with a warning.

    Raises:
        BadShardValueError: it is not UTF-8.
    """
    try:
        text = value if isinstance(value, str) else value.decode("utf-8")
    except UnicodeDecodeError:
        raise BadShardValueError(f"the value {value!r} of a shard is not UTF-8") from None
    parts = [part.strip() for part in text.split(",")]
    flags = (part.removeprefix(_FLAG).strip() for part in parts if part.startswith(_FLAG))
    nodes = [part for part in parts if not part.startswith(_FLAG)]
    if len(nodes) > 2:
        logger.warning("value %r of a shard: only the first two nodes count", text)
    target, current = (*nodes, "", "")[:2]
    return ShardRecord(target, current, tuple(filter(None, flags)))


def format_shard_value(record: ShardRecord) -> str:
    """Make the text that the store has for a record: always both nodes, then the flags.

    Raises:
        InvalidArgumentError: it would be read as something else, for there is a comma in a node, say.
    """
    flags = (_FLAG + flag for flag in record.flags)
    parts = (record.target, record.current, *flags)
    text = ",".join(parts)
    # Written as it is read back: what is refused here is whatever parsing would alter.
    if (
        text.count(",") != len(parts) - 1
        or any(part != part.strip() for part in (*parts, *record.flags))
        or record.target.startswith(_FLAG)
        or record.current.startswith(_FLAG)
        or "" in record.flags
    ):
        raise InvalidArgumentError(
            f"{record} cannot be written: nodes and flags have no comma in them, no white space "
            f"around them, and do not begin with {_FLAG!r}; flags are not empty"
        )
    return text


def _with_number(flags: tuple[str, ...], name: str, number: int | None) -> tuple[str, ...]:
    places = [place for place, flag in enumerate(flags) if flag.startswith(name)]
    kept = [flag for flag in flags if not flag.startswith(name)]
    if number is not None:
        kept.insert(places[0] if places else len(kept), f"{name}{number}")
    return tuple(kept)
