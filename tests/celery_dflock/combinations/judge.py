"""What is wrong with the history of a row. Pure: what happened in, lines out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.celery_dflock.combinations.pairs import Row
from tests.celery_dflock.combinations.task import FLEET, GROUP_LIMIT
from tests.celery_dflock.history import Kill, Span, most_at_once, most_within, runs_of
from tests.celery_dflock.record import Event

ANY_NUMBER = 1_000_000
UNACKNOWLEDGED = 1.0
"""Seconds for which a worker may not yet have said to the broker what a process has said to it."""

ENDS = {
    None: "SUCCESS",
    "SupersededError": "REVOKED",
    **dict.fromkeys(("Timeout", "SystemExit"), "FAILURE TimeLimitExceeded"),
}
"""The final state after a body that ended so; with a hard time limit as gevent and prefork end it."""


@dataclass
class Sent:
    """A call: the arguments, the id that it got, when it was begun and had returned."""

    id: str
    kwargs: dict[str, Any]
    before: float
    after: float


@dataclass
class Stop:
    """How the worker was ended, from when until when."""

    worker: str
    asked: float
    gone: float


@dataclass
class History:
    """All that is known of one row."""

    row: Row
    sent: list[Sent]
    events: list[Event]
    fates: dict[str, str] = field(default_factory=dict)
    """What the result of each task says, if there are results."""
    stop: Stop | None = None
    slots: int = 1
    """How many tasks the worker ran at once."""
    left: list[str] = field(default_factory=list)
    """What there was in the end in the broker and at the lock server."""

    def __post_init__(self) -> None:
        self.of: defaultdict[str, list[Event]] = defaultdict(list)
        for event in sorted(self.events, key=lambda event: event["at"]):
            self.of[event["id"]].append(event)
        self.calls = {call.id: call for call in reversed(self.sent)}
        """The first call of each id."""
        self.was_cut_off = self.row["end"] in ("cold", "kill")

    def over(self, id: str) -> float | None:
        """When a task had its final state; None if the last of its runs has sent it again."""
        over, before = None, ""
        for event in self.of[id]:
            what = event["what"]
            # None: it was killed, and wrote nothing.
            if what == "done" and event["state"] not in ("RETRY", None):
                # A redelivery that is to look for a result once more is sent again without a word.
                is_sent_again = event["state"] == "IGNORED" and before in ("requeued", "asked")
                over = over if is_sent_again else event["at"]
            before = what
        return over


def faults(history: History) -> list[str]:
    rules = (limits, runs, lost, states, unique)
    return [*(line for rule in rules for line in rule(history)), *history.left]


def limits(history: History) -> Iterator[str]:
    """More at once, or sooner, than a limit allows."""
    row, stop = history.row, history.stop
    most = row["limit"] or ANY_NUMBER
    kills = [Kill(stop.asked, stop.worker)] if stop and history.was_cut_off else []
    spans, starts = defaultdict[Any, list[Span]](list), defaultdict[Any, list[Any]](list)
    for start, end in runs_of(history.events, kills):
        key, tenant = start["key"], start["kwargs"]["tenant"]
        weight = start["kwargs"]["weight"] if row["weight"] == "{weight}" else row["weight"]
        slots = most if weight == "all" else weight
        spans[key, "the key", most].append(Span(start["at"], end, slots))
        if row["group"] == "limited":
            part = Span(start["at"], end, min(slots, GROUP_LIMIT))
            spans[key, f"group {tenant}", GROUP_LIMIT].append(part)
        if row["keys"] == "locks":
            spans["fleet", "the key", FLEET].append(Span(start["at"], end))
        if row["rate"]:
            starts[key].append((start["acquired"], min(slots, row["rate"][0])))
    for (key, what, allowed), each in spans.items():
        if (found := most_at_once(each)) > allowed:
            yield f"{found} slots of {key} at once, {allowed} for {what}"
    for key, begun in starts.items():
        allowed, window = row["rate"]
        if (found := most_within(begun, window)) > allowed:
            yield f"{found} starts of {key} in {window} s, {allowed} allowed"


def runs(history: History) -> Iterator[str]:
    """A run that there was twice, and not because its message was not acknowledged yet."""
    for id, events in history.of.items():
        starts = [event for event in events if event["what"] == "start"]
        for retries in {start["retries"] for start in starts}:
            first, *more = [start for start in starts if start["retries"] == retries]
            if more and not _is_unacknowledged(history, first, events):
                yield f"{id} ran {1 + len(more)} times as retry {retries}"


def _is_unacknowledged(history: History, start: Event, events: Sequence[Event]) -> bool:
    """Whether the worker was cut off before it had to say to the broker that it has the run."""
    stop = history.stop
    if stop is None or not history.was_cut_off or start["at"] > stop.gone:
        return False
    said = start["at"]
    if history.row["late"]:
        ends = [e["at"] for e in events if e["what"] == "done" and e["pid"] == start["pid"]]
        said = min((at for at in ends if at >= start["at"]), default=stop.gone)
    return bool(said > stop.asked - UNACKNOWLEDGED)


def lost(history: History) -> Iterator[str]:
    """A task that never came to an end.

    A worker that is cut off takes with it what it had acknowledged: without `acks_late` what its
    processes were running, and as many as it had just handed to them. Killed, it takes one more from
    Redis: kombu takes a message off its list first and keeps a copy of it second. In greenlets, what
    a cold shutdown ends Celery acknowledges, with `acks_late` too, and without this plugin.
    """
    row = history.row
    is_late = row["late"] and not (row["end"] == "cold" and row["pool"] in ("gevent", "eventlet"))
    handed = 0
    for id in history.calls:
        if history.over(id) is not None:
            continue
        last = history.of[id][-1] if history.of[id] else None
        stop = history.stop
        is_cut_off = stop is not None and history.was_cut_off
        is_in_hands = last is not None and stop is not None and last["at"] < stop.gone
        if is_cut_off and last is None:
            handed += 1
        elif not (is_cut_off and is_in_hands and not is_late):
            yield f"{id} was lost after {last and last['what']}"
    at_most = 0 if is_late else history.slots
    at_most += row["broker"] == "redis" and row["end"] == "kill"
    if handed > at_most:
        yield f"{handed} tasks were lost before they began, {at_most} may be"


def states(history: History) -> Iterator[str]:
    """A final state that is not that of what happened."""
    if not history.fates:
        return
    for id in history.calls:
        fate, allowed = history.fates[id], _allowed(history, id)
        if allowed is not None and fate not in allowed:
            yield f"{id} is {fate}, not {' or '.join(sorted(allowed))}"


def _is_cut_off(history: History, end: Event) -> bool:
    """Whether a body ended while its worker was cut off, mostly by that: all states are possible."""
    stop = history.stop
    return stop is not None and history.was_cut_off and stop.asked <= end["at"] <= stop.gone


def _allowed(history: History, id: str) -> set[str] | None:
    """What the result may say; None of a task that was lost with its worker."""
    row, events, kwargs = history.row, history.of[id], history.calls[id].kwargs
    if history.over(id) is None:
        return None
    last = [event for event in events if event["what"] in ("end", "superseded", "skipped")][-1:]
    if last and last[0]["what"] == "end":
        if _is_cut_off(history, last[0]):
            return None
        error = last[0]["error"]
        return {ENDS.get(error, f"FAILURE {error}")}
    if last:
        return {"Skipped"} if last[0]["what"] == "skipped" else {"REVOKED", "Skipped"}
    allowed = {"fail": {"FAILURE LockNotAcquiredError"}, "function": {"instead"}}
    found = allowed.get(row["conflict"], set()) if row["timeout"] is not None else set()
    if kwargs.get("seconds", 0) > 1:
        limit = {"soft": "SoftTimeLimitExceeded", "hard": "TimeLimitExceeded"}[row["time_limit"]]
        found = found | {f"FAILURE {limit}"}
    return found


def unique(history: History) -> Iterator[str]:
    """A call that was not sent though no other was on its way, or was sent though one was."""
    until, stop = history.row["unique"], history.stop
    if until is None:
        return
    latest: dict[str, Sent] = {}
    for call in history.sent:
        first = latest.get(call.kwargs["key"])
        is_sent = history.calls[call.id] is call
        if is_sent:
            latest[call.kwargs["key"]] = call
        if first is None:
            continue
        surely, at_latest = _counts_until(history, first.id)
        # With a process that is cut off ends what its task counted for.
        is_freed = stop is not None and history.was_cut_off and call.after > stop.asked
        if is_sent and call.after < surely and (until == "until_expired" or not is_freed):
            yield f"{call.id} was sent while {first.id} was on its way"
        if not is_sent and at_latest + UNACKNOWLEDGED < call.before:
            yield f"{call.id} was not sent again though it was over"


def _counts_until(history: History, id: str) -> tuple[float, float]:
    """Until when a task surely keeps others from being sent, and until when at the latest."""
    never = float("inf")
    if history.row["unique"] == "until_expired":
        return never, never
    events = [e for e in history.of[id] if e["what"] in ("start", "end", "done", "asked")]
    first_asked = min((e["at"] for e in events), default=never)
    over = history.over(id) or never
    if history.row["unique"] == "until_executing":
        started = min((e["at"] for e in events if e["what"] == "start"), default=over)
        return first_asked, started
    ends = [e["at"] for e in events if e["what"] == "end"]
    return (ends[-1] if ends else first_asked), over
