"""Why somebody waits, in words: what the lock servers know of a text, and where a wait leads to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from celery_dflock.limits import MAX_LIMIT
from dflockd.admin import describe_pause, duration, printable
from dflockd.rates import keeps_waiting, needed

Found = Mapping[str, Any]
"""A row of `dflockd.admin.find`, with the ``server`` that said it."""

Find = Callable[[str], Iterable[Found]]
"""Looks for a text on all servers."""

LONGEST_CHAIN = 16
"""Waits that are followed from one to the next."""

_TASK = re.compile(r"(\S+\[[^\]\s]+\])(?: (.+))?(?: (\S+) pid (\d+))")
_RUN = re.compile(r"\S+\[[^\]\s]+\]")
"""What a run of a task is labelled with."""

_ORDINALS = (
    *("", "first", "second", "third", "fourth", "fifth"),
    *("sixth", "seventh", "eighth", "ninth", "tenth"),
)


def who(label: str) -> str:
    """Return whom a label names, as people say it."""
    found = _TASK.fullmatch(label)
    if found is None:
        return printable(label) or "someone without a label"
    task, does, host, _ = found.groups()
    where = f" on {host}" if host else ""
    return printable(f"{task}{f' ({does})' if does else ''}{where}")


def run_of(label: str) -> str | None:
    """Return the run of a task that a label names, the same at all its locks."""
    found = _RUN.match(label)
    return found[0] if found else None


def ordinal(number: int) -> str:
    """Return the word for a position."""
    if number < len(_ORDINALS):
        return _ORDINALS[number]
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def in_words(row: Found) -> str:
    """Return what a row says, in a sentence."""
    if row["waiter"] is not None:
        return _waits(row)
    key, holder, waiting = printable(row["key"]), row["holder"], row["waiters"]
    queue = f"{waiting} {'waits' if waiting == 1 else 'wait'} for it" if waiting else "nobody waits"
    if row.get("paused"):
        queue += f"; {describe_pause(row['paused'])}"
    if holder is None:
        return f"{key} is not held; {queue}"
    slots = f", {_taken(row)} of {row['limit']} slots taken" if row["limit"] != 1 else ""
    if row["limit"] == MAX_LIMIT:
        slots = f", {row['holders']} hold it"
    group, newer = holder["group"], holder.get("superseded_by")
    slots += f", in group {printable(group)}" if group else ""
    slots += f", superseded by {who(newer)}" if newer else ""
    since, left = duration(holder["held_s"]), duration(max(0.0, holder["lease_expires_in_s"]))
    return (
        f"{who(holder['label'])} holds {key} for {since}{slots}; its lease ends in {left}; {queue}"
    )


def _waits(row: Found) -> str:
    waiter, holder, position = row["waiter"], row["holder"], row["position"]
    place = "the only one" if row["waiters"] == 1 else f"{ordinal(position)} of {row['waiters']}"
    said = [
        f"{who(waiter['label'])} waits for {printable(row['key'])}, {place}, "
        f"for {duration(waiter['waited_s'])}"
    ]
    if waiter["group"]:
        said.append(f"in group {printable(waiter['group'])}")
    if "weight" in waiter:
        said.append(f"it needs {waiter['weight']} of {row['limit']} slots")
    if waiter["away"]:
        said.append("it is requeued and keeps its position")
    if waiter["told"]:
        said.append("it has been told that its turn has come")
    rate, weight = row["rate"], waiter.get("weight", 1)
    if holder is None:
        said.append("nobody holds it yet")
    elif _is_full(row) or not keeps_waiting(rate, weight):
        others = f" and {row['holders'] - 1} more" if row["holders"] > 1 else ""
        said.append(f"held by {who(holder['label'])}{others} for {duration(holder['held_s'])}")
    if row.get("paused"):
        said.append(describe_pause(row["paused"]))
    elif keeps_waiting(rate, weight) and rate["free"]:
        said.append(f"{rate['free']} of {rate['runs']} places of the rate are free")
    elif keeps_waiting(rate):
        said += _rate_forecast(row, rate["next_s"], row["rate_wait_s"])
    else:
        said.append(_forecast(row["pace_s"], position))
    return "; ".join(said)


def _taken(row: Found) -> int:
    """Return how many slots are taken; a holder with a weight takes several."""
    taken: int = row.get("used", row["holders"])
    return taken


def _is_full(row: Found) -> bool:
    """Whether fewer slots are free than the waiter of a row needs."""
    limit: int = row["limit"]
    return _taken(row) + needed(row["waiter"].get("weight", 1), limit) > limit


def _rate_forecast(row: Found, next_s: float | None, own_s: float | None) -> Iterator[str]:
    """Yield when a rate lets the next begin, and this one; by the pace as well if no slot is free."""
    if next_s is None:
        yield "the rate lets the next begin one window after a run that has its lock begins"
        return
    yield f"the rate lets the next begin in {duration(next_s)}"
    if own_s is not None:
        by_pace = row["pace_s"] * row["position"] if _is_full(row) and row["pace_s"] else 0.0
        yield f"about {duration(max(own_s, by_pace))}"


def _forecast(pace: float | None, position: int) -> str:
    if pace is None:
        return "the lock has not changed hands yet, so there is no estimate"
    return f"about {duration(pace * position)} at the current pace"


def chain(row: Found, find: Find) -> Iterator[tuple[str, bool]]:
    """Follow a wait: whom the holder waits for in its turn, on any server, and so on.

    Yields:
        A sentence for each further wait, and whether it closes a circle. Of a semaphore the one who
        has held it longest is followed; nobody can be who says in no label which task it is.
    """
    seen = [run_of(row["waiter"]["label"])]
    while row["holder"] is not None and len(seen) < LONGEST_CHAIN:
        run = run_of(row["holder"]["label"])
        if run is None:
            return
        if run in seen:
            if row["limit"] == 1 and (len(seen) > 1 or not row["waiter"].get("owner")):
                yield _circle([each for each in seen[seen.index(run) :] if each]), True
            return
        seen.append(run)
        found = [each for each in find(run) if each["waiter"] and _is(each["waiter"], run)]
        if not found:
            return
        row = found[0]
        yield in_words(row), False


def _is(waiter: Mapping[str, Any], run: str) -> bool:
    return run_of(waiter["label"]) == run


def _circle(runs: Sequence[str]) -> str:
    if len(runs) == 1:
        return f"deadlock: {printable(runs[0])} waits for what it holds itself, forever"
    text = ", which waits for ".join(map(printable, [*runs, runs[0]])).replace(", which", "", 1)
    return f"deadlock, which only a timeout or the end of a lease resolves: {text}"
