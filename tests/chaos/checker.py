"""What is wrong with a history. Pure: events in, findings out.

It only reports what is certain, from what could be seen from outside: a finding is a fault of the
locks (or of whoever ignores them), never of the way it was observed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

from tests.chaos.history import Event, What
from tests.chaos.options import NEWEST, ONCE
from tests.chaos.story import IN_CONSUMER, IN_DOUBT, Finding, Section, Story

GENTLE = ("cluster-", "server-restart", "client-")
"""Faults that take nothing from the mark of a task that is on its way."""

NEAR = 10_000_000_000
"""Nanoseconds, within the shortest lease of a mark in a cluster, in which a fault counts as near."""


def check(events: Iterable[Event]) -> list[Finding]:
    """Everything that is wrong, in the order in which it showed."""
    story = Story(events)
    found = [finding for rule in RULES for finding in rule(story)]
    return sorted(found, key=lambda finding: finding.at)


def overlaps(story: Story) -> Iterator[Finding]:
    """More holders of one key at once than its limit, all within their leases."""
    for key, group in _by_key(story.sections).items():
        for holders in _together(group):
            if len(holders) > (limit := holders[-1].begin.limit):
                yield _overlap("overlap", f"{key} (limit {limit})", holders)


def overlaps_of_tenants(story: Story) -> Iterator[Finding]:
    """Two holders of one key at once for one tenant, whose limit is one.

    Not over a break: holders of whom a server learns by their renewals are of no group.
    """
    for key, group in _by_key(story.sections).items():
        for tenant in {section.begin.tenant for section in group} - {""}:
            for holders in _together(s for s in group if s.begin.tenant == tenant):
                *others, latest = holders
                now = story.epoch(latest.at)
                if recent := [other for other in others if story.epoch(other.at) == now]:
                    text = f"{key} for {tenant} (limit 1)"
                    yield _overlap("overlap of a tenant", text, [*recent, latest])


def _together(sections: Iterable[Section]) -> Iterator[list[Section]]:
    """For each section those that hold with it when it begins, within their leases; itself last."""
    here: list[tuple[int, int, Section]] = []
    for number, section in enumerate(sections):
        while here and here[0][0] <= section.at:
            heapq.heappop(here)
        if section.sure > section.at:
            heapq.heappush(here, (section.sure, number, section))
            yield sorted((other for _, _, other in here), key=lambda other: other.at)


def _overlap(kind: str, what: str, holders: Sequence[Section]) -> Finding:
    latest = holders[-1]
    names = " and ".join(f"{h.begin.who} (fence {h.begin.fence})" for h in holders)
    together = (min(other.sure for other in holders) - latest.at) / 1e6
    return Finding(
        kind,
        latest.begin.key,
        latest.at,
        f"{len(holders)} holders of {what} within their leases, for {together:.1f} ms: {names}",
        tuple(other.begin for other in holders),
    )


def rates(story: Story) -> Iterator[Finding]:
    """More holders that began within one window than the rate of their key allows.

    One began after it had asked, and before it noted that: it may have been late with that.
    """
    began = [a for a in story.of("begin") if a["begin"].starts and "asked" in a]
    for key in {attempt["begin"].key for attempt in began}:
        mine = [attempt for attempt in began if attempt["begin"].key == key]
        for number, last in enumerate(mine):
            starts, window = last["begin"].starts, last["begin"].window
            until = last["begin"].at
            within = [a for a in mine[:number] if a["asked"].at > until - window]
            if len(within) >= starts:
                first = min(within, key=lambda a: a["asked"].at)
                took = (until - first["asked"].at) / 1e9
                text = (
                    f"{len(within) + 1} starts of {key} within {took:.2f} s: {starts} are allowed"
                )
                events = tuple(a["begin"] for a in [*within, last])
                yield Finding("too many starts", key, until, text, events)


def overruled(story: Story) -> Iterator[Finding]:
    """A task that gave way to one that was sent before it."""
    sent = _sent_for_certain(story, NEWEST)
    for event in story.events:
        if event.what == "superseded" and event.task in sent and event.detail in sent:
            older, newer = sent[event.detail], sent[event.task]
            if older.at < newer.at:
                text = f"task {event.task} gave way to {event.detail}, which was sent before it"
                yield Finding("the newest lost", event.key, event.at, text, (older, newer, event))


def sent_twice(story: Story) -> Iterator[Finding]:
    """A task that was sent while another one of its key was on its way for certain, and no fault near.

    Shards may move meanwhile, and servers end in order.
    """
    sent = sorted(_sent_for_certain(story, ONCE).values(), key=lambda event: event.at)
    done = {event.task: event.at for event in story.events if event.what == "done"}
    faults = [e for e in story.events if e.what == "fault" and not e.detail.startswith(GENTLE)]
    latest: dict[str, Event] = {}
    for event in sent:
        first = latest.get(event.key)
        latest[event.key] = event
        until = event.until or event.at
        if first is None or done.get(first.task, story.finish) < until:
            continue
        start = first.at - NEAR
        is_calm = until < first.at + NEAR and not any(
            fault.at < until and (fault.until or fault.at) + NEAR > start for fault in faults
        )
        if is_calm:
            text = f"task {event.task} was sent while {first.task} was on its way"
            yield Finding("sent twice", event.key, event.at, text, (first, event))


def _sent_for_certain(story: Story, sort: str) -> dict[str, Event]:
    """The tasks of a sort of keys that were sent with all that the lock server says of them."""
    return {
        event.task: event
        for event in story.events
        if event.what == "sent" and event.key.startswith(sort) and event.detail != IN_DOUBT
    }


def fence_order(story: Story) -> Iterator[Finding]:
    """A later grant with a fence that is not larger, or one fence for two grants."""
    largest: dict[str, Event] = {}
    floor: dict[str, Event] = {}
    given: dict[tuple[str, int], Event] = {}
    for event in story.events:
        if event.what == "asked" and event.key in largest:
            floor[event.who] = largest[event.key]
        if event.what != "granted" or event.fence is None:
            continue
        twin = given.setdefault((event.key, event.fence), event)
        if twin is not event:
            yield _fences(twin, event, "both were given")
        elif event.who in floor and _fence(floor[event.who]) > event.fence:
            yield _fences(floor[event.who], event, "granted before the other was asked for")
        if event.key not in largest or event.fence > _fence(largest[event.key]):
            largest[event.key] = event
    yield from _fences_of_sections(story)


def _fences_of_sections(story: Story) -> Iterator[Finding]:
    """Where one holds a key at a time, the sections are in the order of the grants."""
    for group in _by_key(story.sections).values():
        open_ones: list[tuple[int, int, Section]] = []
        largest: Event | None = None
        for number, section in enumerate(group):
            begin = section.begin
            if begin.limit > 1 or begin.fence is None:
                continue
            while open_ones and open_ones[0][0] <= begin.at:
                over = heapq.heappop(open_ones)[2].begin
                if largest is None or _fence(over) > _fence(largest):
                    largest = over
            if largest is not None and _fence(largest) > begin.fence:
                yield _fences(largest, begin, "its section was over before the other began")
            heapq.heappush(open_ones, (section.sure, number, section))


def _fences(first: Event, second: Event, why: str) -> Finding:
    return Finding(
        "fence order",
        second.key,
        second.at,
        f"fence {second.fence} of {second.who} after {first.fence} of {first.who}: {why}",
        (first, second),
    )


def _fence(event: Event) -> int:
    return -1 if event.fence is None else event.fence


def fifo(story: Story) -> Iterator[Finding]:
    """Somebody was granted a key before one who certainly was in its queue before they asked.

    Fences tell the order of the grants. Only attempts between two breaks of connections are
    compared: whoever lost a connection has lost the place in the queue. A task that was requeued may
    have kept its place, and counts as having asked when it did so for the first time.

    The order is that of those who are ready. A task that waits in the consumer of a worker is while a
    process of that is free, which nobody notes: so it may be passed, and passes nobody itself.
    """
    queued: defaultdict[tuple[str, int], list[dict[What, Event]]] = defaultdict(list)
    for attempt in story.of("queued"):
        place, begun = attempt["queued"], attempt.get("asked")
        # That it has a place is noted after the answer: the connection may have broken in between.
        if begun is not None and begun.detail == IN_CONSUMER:
            continue
        if begun is None or story.epoch(begun.at) == story.epoch(place.at):
            queued[place.key, story.epoch(place.at)].append(attempt)
    asked: defaultdict[tuple[str, int], list[tuple[int, dict[What, Event]]]] = defaultdict(list)
    first: dict[str, int] = {}
    for attempt in story.of("asked"):
        begun = attempt["asked"]
        arrival = first.setdefault(begun.task, begun.at) if begun.task else begun.at
        granted = attempt.get("granted")
        if granted is not None and story.epoch(granted.at) == story.epoch(begun.at):
            asked[granted.key, story.epoch(begun.at)].append((arrival, attempt))
    for name, waiters in queued.items():
        others = sorted(asked[name], key=itemgetter(0))
        yield from _overtaken(waiters, others)
        yield from _passed_over(waiters, others)


def _overtaken(
    waiters: Sequence[dict[What, Event]], others: Sequence[tuple[int, dict[What, Event]]]
) -> Iterator[Finding]:
    """Waiters who were granted later than others who came after them."""
    times = [waiter["queued"].at for waiter in waiters]
    latest: list[dict[What, Event]] = []
    for waiter in waiters:
        best = latest[-1] if latest else waiter
        latest.append(waiter if _granted_fence(waiter) > _granted_fence(best) else best)
    for arrival, other in others:
        ahead = bisect_left(times, arrival)
        if ahead and _granted_fence(latest[ahead - 1]) > _granted_fence(other) >= 0:
            first = latest[ahead - 1]
            text = f"and was granted later (fence {first['granted'].fence})"
            yield _overtaking(first["queued"], other, text, first["granted"])


def _granted_fence(attempt: Mapping[What, Event]) -> int:
    return _fence(attempt["granted"]) if "granted" in attempt else -1


def _passed_over(
    waiters: Sequence[dict[What, Event]], others: Sequence[tuple[int, dict[What, Event]]]
) -> Iterator[Finding]:
    """Waiters who were never granted, while others who came after them were."""
    times = [arrival for arrival, _ in others]
    for waiter in waiters:
        gave_up = waiter.get("gave_up")
        if gave_up is None or gave_up.until is None:
            continue
        place = waiter["queued"]
        behind = others[bisect_right(times, place.at) : bisect_left(times, gave_up.until)]
        for _, other in behind:
            if other["granted"].at < gave_up.until:
                yield _overtaking(place, other, "and still waited", gave_up)


def _overtaking(place: Event, other: Mapping[What, Event], what: str, last: Event) -> Finding:
    granted = other["granted"]
    return Finding(
        "not first come, first served",
        granted.key,
        granted.at,
        f"{granted.who} asked after {place.who} was in the queue of {granted.key} and was granted "
        f"(fence {granted.fence}); {place.who} came first {what}",
        (place, other["asked"], granted, last),
    )


def lost_early(story: Story) -> Iterator[Finding]:
    """A holder who was told that the lock is lost while its lease still ran."""
    for event in story.events:
        if event.what == "lost" and event.until is not None and event.at < event.until:
            left = (event.until - event.at) / 1e9
            text = (
                f"{event.who} was told that {event.key} is lost, {left:.2f} s before its lease ends"
            )
            yield Finding("lost within its lease", event.key, event.at, text, (event,))


def lost_waiters(story: Story) -> Iterator[Finding]:
    """Somebody who asked and never heard anything."""
    for who, attempt in story.attempts.items():
        asked = attempt.get("asked")
        if asked is None or attempt.keys() & {"granted", "gave_up"}:
            continue
        if story.death(asked) is not None:
            continue
        if asked.detail == IN_CONSUMER and story.is_of_a_stopped(asked):
            continue
        text = f"{who} asked for {asked.key} and was neither granted it, nor refused, nor timed out"
        yield Finding("lost waiter", asked.key, asked.at, text, tuple(attempt.values()))


def lost_tasks(story: Story) -> Iterator[Finding]:
    """A task that was sent and has no result; not one that Redis handed to a worker killed just then.

    See `undelivered`.
    """
    excused = undelivered(story.events)
    sent = {event.task: event for event in story.events if event.what == "sent"}
    done = {event.task for event in story.events if event.what in ("done", "superseded")}
    for task in sent.keys() - done - excused:
        events = tuple(event for event in story.events if event.task == task)
        text = f"task {task} was sent and has no result"
        yield Finding("lost task", sent[task].key, sent[task].at, text, events)


def undelivered(events: Iterable[Event]) -> set[str]:
    """The tasks that no worker took up after they were last sent, before one was killed.

    Kombu takes a message off its Redis list first and keeps a copy of it second: one that is killed
    in between has lost it, with locks or without. No lock was asked for yet. A task that was requeued
    is a message again.
    """
    sent: dict[str, int] = {}
    killed = 0
    for event in events:
        if event.what in ("sent", "requeued"):
            sent[event.task] = event.at
        elif event.what == "asked" and event.task:
            sent.pop(event.task, None)
        elif event.what == "fault" and event.detail.startswith("worker-kill"):
            killed = max(killed, event.until or event.at)
    return {task for task, at in sent.items() if at < killed}


def double_runs(story: Story) -> Iterator[Finding]:
    """A task that ran again though its result was stored.

    Not one of which a run was over when its worker was killed or stopped: Celery acknowledges a
    message after it has stored the result, or after the task was sent again, and what was not
    acknowledged is delivered again.
    """
    done: dict[str, Event] = {}
    doubled: set[str] = set()
    for event in story.events:
        if event.what in ("done", "requeued", "gave_up") and not story.is_acknowledged(event):
            doubled.add(event.task)
        if event.what == "done":
            done.setdefault(event.task, event)
        elif event.what == "started" and event.task in done and event.task not in doubled:
            text = f"task {event.task} ran again after its end, as {event.who}"
            yield Finding("double run", event.key, event.at, text, (done[event.task], event))


def stale_writes(story: Story) -> Iterator[Finding]:
    """A write that the fenced resource accepted though it had seen a larger fence."""
    largest: dict[str, Event] = {}
    for event in story.events:
        if event.what not in ("accepted", "refused") or event.fence is None:
            continue
        first = largest.setdefault(event.key, event)
        if event.fence > _fence(first):
            largest[event.key] = event
        elif event.what == "accepted" and event.fence < _fence(first):
            text = f"a write of {event.who} (fence {event.fence}) after fence {first.fence}"
            yield Finding("stale write accepted", event.key, event.at, text, (first, event))


RULES: tuple[Callable[[Story], Iterator[Finding]], ...] = (
    overlaps,
    overlaps_of_tenants,
    rates,
    overruled,
    sent_twice,
    fence_order,
    fifo,
    lost_early,
    lost_waiters,
    lost_tasks,
    double_runs,
    stale_writes,
)


def first_grants(events: Iterable[Event], server_of: Callable[[str], str]) -> list[float]:
    """Seconds from the start of each restarted server's process to the first grant by it.

    Args:
        events: the history; a ``restarted`` has the server's name as `detail`, the start of its
            process as `at`, and as `until` when it listened.
        server_of: the name of the server in charge of a key.
    """
    started: dict[str, Event] = {}
    times = []
    for event in sorted(events, key=lambda event: event.at):
        if event.what == "restarted":
            started[event.detail] = event
        elif event.what == "granted":
            server = server_of(event.key)
            restart = started.get(server)
            if restart is not None and event.at >= (restart.until or 0):
                times.append((event.at - restart.at) / 1e9)
                del started[server]
    return times


def over_restarts(events: Iterable[Event], server_of: Callable[[str], str]) -> int:
    """How many sections were held within their leases all through a restart of their server."""
    story = Story(events)
    restarts = [event for event in story.events if event.what == "restarted"]
    return sum(
        any(
            server_of(section.begin.key) == restart.detail
            and section.at < restart.at
            and (restart.until or restart.at) < section.sure
            for restart in restarts
        )
        for section in story.sections
    )


def _by_key(sections: Iterable[Section]) -> dict[str, list[Section]]:
    groups: dict[str, list[Section]] = {}
    for section in sections:
        groups.setdefault(section.begin.key, []).append(section)
    return groups
