"""Short words for the events of a history."""

from __future__ import annotations

from typing import Any

from tests.chaos.checker import check
from tests.chaos.history import Event, What

MS = 1_000_000


def event(what: What, at: float, who: str = "", key: str = "k", **more: Any) -> Event:
    """An event at so many milliseconds, in the process that the name begins with."""
    if "until" in more:
        more["until"] = round(more["until"] * MS)
    return Event(what, round(at * MS), pid=pid(who), who=who, key=key, **more)


def pid(who: str) -> int:
    return ord(who[0]) if who else 0


def section(who: str, begin: float, end: float, **more: Any) -> list[Event]:
    held = {"held": True, **more}
    return [event("begin", begin, who, **more), event("end", end, who, **held)]


def attempt(
    who: str, asked: float, queued: float | None, granted: float | None, fence: int | None = None
) -> list[Event]:
    events = [event("asked", asked, who)]
    if queued is not None:
        events.append(event("queued", queued, who))
    if granted is not None:
        events.append(event("granted", granted, who, fence=fence))
    return events


def died(who: str, at: float) -> Event:
    return Event("died", round(at * MS), pid=pid(who))


def kinds(*events: Event | list[Event]) -> list[str]:
    flat = [e for one in events for e in (one if isinstance(one, list) else [one])]
    return [finding.kind for finding in check(flat)]
