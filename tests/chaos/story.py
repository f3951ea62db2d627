"""What a history tells: who held which lock and from when to when, who waited, and who died."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.chaos.history import Event, What

UNACKNOWLEDGED = 2_000_000_000
"""Nanoseconds that Celery may take to acknowledge a task after its end."""

IN_CONSUMER = "in the consumer"
"""The detail of those who ask where a worker that ends leaves them to the broker."""

IN_DOUBT = "in doubt"
"""The detail of tasks that were sent without all that a lock server has to say of them."""


@dataclass(frozen=True)
class Finding:
    """Something that must not be.

    Attributes:
        kind: a few words, the same for all of its kind.
        key: the lock; empty where it is about none.
        at: when it showed, in nanoseconds.
        text: what happened, for people.
        events: those that prove it.
    """

    kind: str
    key: str
    at: int
    text: str
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A critical section.

    Attributes:
        begin: its first event.
        end: when it was over: it ended, or its process died.
        sure: until when its holder took the lock to be held and could not know better.
        killed: whether its process died in it.
    """

    begin: Event
    end: int
    sure: int
    killed: bool

    @property
    def at(self) -> int:
        return self.begin.at


class Story:
    """A history, put in order: the events of each attempt, and who died when."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda event: event.at)
        self.finish = self.events[-1].at if self.events else 0
        self.attempts: dict[str, dict[What, Event]] = {}
        self.breaks: list[int] = []
        """When connections were broken: who waited for what begins anew."""
        self._stopping: dict[int, int] = {}
        self._deaths: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for event in self.events:
            if event.who:
                # The last of several, such as renewals, counts.
                self.attempts.setdefault(event.who, {})[event.what] = event
            elif event.what == "died":
                self._deaths["group" if event.group else "pid", event.group or event.pid].append(
                    event.at
                )
            elif event.what == "stopping":
                self._stopping[event.group] = event.at
            elif event.what in ("broken", "restarted"):
                self.breaks.append(event.at)
        self.sections = sorted(self._sections(), key=lambda section: section.at)

    def death(self, event: Event) -> int | None:
        """When the process of an event died after it, as far as the driver killed it."""
        deaths = (
            next((at for at in self._deaths[name] if at >= event.at), None)
            for name in (("pid", event.pid), ("group", event.group))
        )
        return min((at for at in deaths if at is not None), default=None)

    def is_acknowledged(self, event: Event) -> bool:
        """Whether what a task's run ended with has been taken up by its worker, for certain."""
        death, stopping = self.death(event), self._stopping.get(event.group)
        is_killed = death is not None and death < event.at + UNACKNOWLEDGED
        # A worker that ends does not listen to its children to the last.
        is_late = stopping is not None and stopping < event.at + UNACKNOWLEDGED
        return not is_killed and not is_late

    def is_of_a_stopped(self, event: Event) -> bool:
        """Whether the worker of an event was told to end at some time."""
        return event.group in self._stopping

    def epoch(self, at: int) -> int:
        """Which stretch between two breaks a time is in."""
        return bisect_right(self.breaks, at)

    def of(self, what: What) -> list[dict[What, Event]]:
        """The attempts that have such an event, in its order."""
        found = (attempt for attempt in self.attempts.values() if what in attempt)
        return sorted(found, key=lambda attempt: attempt[what].at)

    def _sections(self) -> Iterator[Section]:
        for attempt in self.attempts.values():
            begin = attempt.get("begin")
            if begin is not None:
                yield self._section(begin, attempt)

    def _section(self, begin: Event, attempt: Mapping[What, Event]) -> Section:
        end = attempt.get("end")
        death = None if end is not None else self.death(begin)
        if end is not None:
            last, sure = end.at, end.at if end.held else _deadline(end, end.at)
        elif "superseded" in attempt and "released" in attempt:
            # It was interrupted as it began, or as it was about to say that it ends.
            last = sure = attempt["released"].at
        else:
            last = self.finish if death is None else death
            sure = _deadline(attempt.get("renewed", begin), last)
        if "lost" in attempt and not (end is not None and end.held):
            sure = min(_deadline(attempt["lost"], sure), attempt["lost"].at)
        return Section(begin, last, sure, death is not None)


def _deadline(event: Event, at_most: int) -> int:
    return at_most if event.until is None else min(at_most, event.until)
