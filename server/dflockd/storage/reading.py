"""What may be believed of a journal that an earlier process has left: the one place that decides it.

- `Trust.CLOSED`, a clean stop: the segments that the state file lists are there, to their last byte.
- `Trust.KEPT`, a kill on this boot: the kernel has all that was written. Only the last write may be
  incomplete, and no client has an answer for it: it is behind the end that the last segment names.
- `Trust.CUT`, a machine that ended, or a sync that failed: what was synced is there, what was not may
  be missing or torn.
- `Trust.NONE`, damage that an operator has said to go on with: what can be read counts.

Where something else is missing, or is not what was written, that is damage, and the journal is not
used at all: what it lacks could be a lock that somebody holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from dflockd.storage import segment
from dflockd.storage.disk import Disk
from dflockd.storage.records import PausedKey, UnknownRecordError
from dflockd.storage.segment import Content, SegmentStage
from dflockd.storage.state_file import OtherFormatError
from dflockd.table import HoldRecord, NewestRecord
from dflockd.table.pauses import PauseRecord
from dflockd.table.rates import PackedRecord, RateRecord


class Trust(Enum):
    """How a journal was left."""

    CLOSED = "a clean stop"
    KEPT = "a kill on this boot"
    CUT = "a machine that ended"
    NONE = "anything"


class DamagedError(Exception):
    """A file is not what was written; the text says which and where."""


class Restored(NamedTuple):
    """What a journal says of the end of its time."""

    holds: list[HoldRecord]
    fence: int
    """The largest fence that it knows to have been given out."""
    newest: Sequence[NewestRecord] = ()
    rates: Sequence[RateRecord | PackedRecord] = ()
    """Those of one rate in their order."""
    pauses: Sequence[PauseRecord] = ()


class Journaled(NamedTuple):
    """Which journal is meant."""

    identity: bytes
    """Of the directory."""
    generation: int
    closed: Sequence[Sequence[int]]
    """Number and end of each of its segments, if it was closed."""


def name_of(generation: int, number: int) -> str:
    """Return the name of a segment."""
    return f"journal-{generation:08d}-{number:012d}"


def names_of(generation: int) -> str:
    """Return the pattern of the names of a generation's segments."""
    return f"journal-{generation:08d}-" + "[0-9]" * 12


_AT_END = segment.END * segment.WORD
"""Where a segment says how far it counts."""

ALL_NAMES = "journal-" + "[0-9]" * 8 + "-" + "[0-9]" * 12
"""The pattern of the names of all segments."""


def read(disk: Disk, journal: Journaled, trust: Trust) -> Restored:
    """Return what a journal says.

    Raises:
        DamagedError: something is missing or wrong that should not be.
        OtherFormatError: a later version has written it.
        OSError: it cannot be read.
    """
    found: dict[int, Content | None] = {}
    for name in disk.names(names_of(journal.generation)):
        number = _number_of(name)
        try:
            content = segment.parse(disk.read(name), journal.identity, journal.generation, number)
        except UnknownRecordError as exc:
            raise OtherFormatError(f"{disk.path / name}: {exc}") from None
        found[number] = content
    # What is older than the oldest that counts is about to be deleted, some of it perhaps already.
    first = max((content.first for content in found.values() if content), default=0)
    found = {number: content for number, content in found.items() if number >= first}
    check = _Check(disk, journal, found, first)
    if trust is Trust.CLOSED:
        return _result(check.closed())
    if trust is Trust.KEPT:
        return _result(check.kept())
    if trust is Trust.CUT:
        check.cut()
    return _result([content for _, content in sorted(found.items()) if content is not None])


def _number_of(name: str) -> int:
    """Return the number of the segment of that name."""
    return int(name.rpartition("-")[2])


class _Check:
    """The rules of the table above, one method for each of its rows."""

    def __init__(
        self, disk: Disk, journal: Journaled, found: dict[int, Content | None], first: int
    ) -> None:
        self._disk = disk
        self._journal = journal
        self._found = found
        self._first = max(first, 1)

    def closed(self) -> list[Content]:
        """Return the segments of a clean stop."""
        listed = self._journal.closed
        stages = [SegmentStage.TURNED] * (len(listed) - 1) + [SegmentStage.CLOSED]
        contents = []
        for (number, end), stage in zip(listed, stages, strict=True):
            content = self._sound(number, stage)
            if content.end != end:
                raise self._damaged(number, _AT_END)
            contents.append(content)
        return contents

    def kept(self) -> list[Content]:
        """Return the segments of a process that was killed."""
        last = max(self._found, default=self._first)
        before, latest = self._found.get(last - 1), self._found.get(last)
        if before is not None and before.stage is SegmentStage.OPEN and before.flaw is None:
            # The process had begun the next segment, and not yet written to it.
            if latest is not None and latest.end > segment.RECORDS:
                raise self._damaged(last - 1, _AT_END)
            last -= 1
        # First those that are there: they know what else there should be.
        for number in sorted(self._found):
            if number < last:
                self._sound(number, SegmentStage.TURNED)
        content = self._sound(last, SegmentStage.OPEN, SegmentStage.CLOSED)
        return [*(self._content(number) for number in range(self._first, last)), content]

    def cut(self) -> None:
        """Check that what was synced is there."""
        # A segment has its mark only once all before it are on the disk, to their last byte; and the
        # first of a generation has it before the generation counts.
        marked = [number for number, content in self._found.items() if content and content.synced]
        last = max(marked, default=self._first)
        for number in range(self._first, last):
            self._sound(number, SegmentStage.TURNED)
        content = self._content(last)
        if content.whole < max(content.synced, segment.RECORDS) or not marked:
            raise self._damaged(last, content.whole)

    def _content(self, number: int) -> Content:
        if number not in self._found:
            raise self._missing(number)
        content = self._found[number]
        if content is None:
            raise self._damaged(number, 0)
        return content

    def _sound(self, number: int, *stages: SegmentStage) -> Content:
        content = self._content(number)
        if content.whole < content.end:
            raise self._damaged(number, content.whole)
        if content.flaw is not None:
            raise self._damaged(number, content.flaw)
        if content.stage is SegmentStage.TURNED and SegmentStage.TURNED not in stages:
            raise self._missing(number + 1)
        if content.stage not in stages:
            raise self._damaged(number, _AT_END)
        return content

    def _missing(self, number: int) -> DamagedError:
        return DamagedError(f"{self._path(number)}: missing")

    def _damaged(self, number: int, position: int) -> DamagedError:
        return DamagedError(f"{self._path(number)}: damaged at byte {position}")

    def _path(self, number: int) -> str:
        return str(self._disk.path / name_of(self._journal.generation, number))


def _result(contents: list[Content]) -> Restored:
    """Return what segments say, one after the other: the latest of all that has not ended.

    And of each part of a rate that is of use.
    """
    holds: dict[int, HoldRecord] = {}
    newest: dict[bytes, NewestRecord] = {}
    rates: dict[int, RateRecord | PackedRecord] = {}
    pauses: dict[bytes, PauseRecord] = {}
    highest = 0
    for content in contents:
        highest = max(highest, content.fence)
        for record in content.records:
            if isinstance(record, int):
                holds.pop(record, None)
                rates.pop(-record, None)
            elif isinstance(record, bytes):
                newest.pop(record, None)
            elif isinstance(record, PausedKey):
                pauses.pop(record.key, None)
            elif isinstance(record, PauseRecord):
                pauses[record.key] = record
            elif isinstance(record, RateRecord | PackedRecord):
                rates[record.number] = record
            elif isinstance(record, NewestRecord):
                highest = max(highest, record.age)
                newest.pop(record.key, None)  # whose key was asked for last comes last
                newest[record.key] = record
            else:
                highest = max(highest, record.fence)
                holds[record.fence] = record
    in_order = tuple(rates[number] for number in sorted(rates))
    return Restored(
        list(holds.values()), highest, tuple(newest.values()), in_order, tuple(pauses.values())
    )
