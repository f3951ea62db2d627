"""The history of runs under limits: how much was taken at once, and how fast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from tests.celery_dflock.record import Event


class Kill(NamedTuple):
    """When a worker was killed, at the latest before, and its processes with it."""

    at: float
    worker: str


class Span(NamedTuple):
    """For how long a run had so many slots."""

    start: float
    end: float
    slots: int = 1


def runs_of(events: Iterable[Event], kills: Sequence[Kill]) -> Iterator[tuple[Event, float]]:
    """Each run with its end; one without has ended with its worker.

    One that its worker has ended, which goes on, may have ended as soon as it had begun.
    """
    events = list(events)
    ends = defaultdict[Any, list[float]](list)
    for event in events:
        if event["what"] == "end":
            ends[event["id"], event["pid"]].append(event["at"])
    for start in events:
        if start["what"] == "start":
            killed = [kill.at for kill in kills if kill.worker == start["worker"]]
            until = ends[start["id"], start["pid"]] or killed
            yield start, min((at for at in until if at >= start["at"]), default=start["at"])


def most_at_once(spans: Iterable[Span]) -> int:
    """How many slots were taken at once, where that was most. An end comes before a start."""
    changes = [
        change for span in spans for change in ((span.start, span.slots), (span.end, -span.slots))
    ]
    return max(accumulate(slots for _, slots in sorted(changes)), default=0)


def most_within(starts: Iterable[tuple[float, int]], window: float) -> int:
    """How many slots were begun with within a window of time, where that was most."""
    return most_at_once(Span(at, at + window, slots) for at, slots in starts)
