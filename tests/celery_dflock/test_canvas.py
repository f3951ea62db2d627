"""Groups, chains and chords whose members are in each other's way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import pytest
from celery import Signature, chain, chord, group
from celery.result import AsyncResult, GroupResult

from celery_dflock import Skipped
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import Cluster, Event

RUNS = 100
AT_A_TIME = 10
"""Runs that are under way together: enough that they wait for Celery's pauses all at once."""

WORK = 0.005
MEMBERS = 3
WAIT = 60.0

pytestmark = pytest.mark.usefixtures("workers")

Canvas = Callable[[str], Signature]


def member(key: str) -> Signature:
    """One of several that want the same lock: it is requeued while another has it."""
    return jobs.requeued.si(key, seconds=WORK)


def collect(key: str) -> Signature:
    return jobs.collect.s(key=key)


def members(key: str) -> list[Signature]:
    return [member(key) for _ in range(MEMBERS)]


def a_chord(key: str) -> Signature:
    return chord(members(key), collect(key))


def a_chord_of_groups(key: str) -> Signature:
    return chord([group(members(key)), member(key)], collect(key))


def a_chord_of_chains(key: str) -> Signature:
    return chord([chain(member(key), member(key)) for _ in range(MEMBERS)], collect(key))


def a_chord_in_a_chain(key: str) -> Signature:
    return chain(member(key), chord(members(key), collect(key)), collect(f"{key}:end"))


def a_chain(key: str) -> Signature:
    return chain(*members(key), collect(key))


CANVASES: dict[Canvas, int] = {
    a_chord: MEMBERS,
    a_chord_of_groups: MEMBERS + 1,
    a_chord_of_chains: 2 * MEMBERS,
    a_chord_in_a_chain: 1 + MEMBERS,
    a_chain: MEMBERS,
}
"""How many locked tasks each has."""


SOME = RUNS // 10
"""As many `make test` sees of each, and the soak tests the rest."""


def in_batches(keys: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(keys)
    while batch := list(itertools.islice(rest, AT_A_TIME)):
        yield batch


def of_keys(events: list[Event], key: str) -> list[Event]:
    return [event for event in events if event["key"] == key]


def assert_each_once(cluster: Cluster, keys: list[str], number: int) -> None:
    starts, ends = cluster.events(what="start"), cluster.events(what="end")
    for key in keys:
        ran = of_keys(starts, key)
        assert len(ran) == len({event["id"] for event in ran}) == number
        assert all(event["fence"] for event in ran)
        assert all(event["retries"] == 0 for event in ran)
        ended = sorted(event["at"] for event in of_keys(ends, key))
        begun = sorted(event["at"] for event in ran)
        assert all(end < start for end, start in zip(ended, begun[1:], strict=False))


@pytest.mark.parametrize(
    ("canvas", "runs"),
    [
        *((canvas, SOME) for canvas in CANVASES),
        *(pytest.param(canvas, RUNS, marks=pytest.mark.soak) for canvas in CANVASES),
    ],
)
@pytest.mark.timeout(600)
def test_the_body_runs_once_with_all_results(
    cluster: Cluster, key: str, canvas: Canvas, runs: int
) -> None:
    keys = [f"{key}:{number}" for number in range(runs)]
    results: dict[str, object] = {}
    with cluster.lock(keys[0]):  # somebody is in the way of one at least
        first = canvas(keys[0]).apply_async()
        cluster.wait(lambda: of_keys(cluster.events(what="requeued"), keys[0]) or None, "a requeue")
    results[keys[0]] = first.get(timeout=WAIT)
    for batch in in_batches(keys[1:]):
        sent = {each: canvas(each).apply_async() for each in batch}
        results |= {each: result.get(timeout=WAIT) for each, result in sent.items()}

    number = CANVASES[canvas]
    assert_each_once(cluster, keys, number)
    collected = cluster.events(what="collected")
    starts = cluster.events(what="start")
    for each in keys:
        (body,) = of_keys(collected, each)
        if canvas is a_chain:
            assert results[each] in {start["id"] for start in of_keys(starts, each)}
            continue
        assert body["results"] == results[each]
        assert len(of_keys(collected, f"{each}:end")) == (canvas is a_chord_in_a_chain)
        given = body["results"]
        expected = number if canvas in (a_chord, a_chord_of_groups) else MEMBERS
        ran = {start["id"] for start in of_keys(starts, each)}
        assert len(given) == len(set(given)) == expected
        assert set(given) <= ran, "the results are those of the runs"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("runs", [SOME, pytest.param(RUNS, marks=pytest.mark.soak)])
def test_a_chord_with_skipped_members_completes(cluster: Cluster, key: str, runs: int) -> None:
    keys = [f"{key}:{number}" for number in range(runs)]
    results: dict[str, AsyncResult] = {}
    values: dict[str, list[object]] = {}

    def send(key: str) -> AsyncResult:
        parts = [jobs.skipped.s(key, seconds=10 * WORK) for _ in range(MEMBERS)]
        return chord(parts)(collect(key))

    busy = keys[0]
    with cluster.lock(busy):
        results[busy] = send(busy)
        values[busy] = results[busy].get(timeout=WAIT)
    for batch in in_batches(keys[1:]):
        sent = {each: send(each) for each in batch}
        results |= sent
        values |= {each: result.get(timeout=WAIT) for each, result in sent.items()}

    starts, collected = cluster.events(what="start"), cluster.events(what="collected")
    for each, result in results.items():
        assert len(of_keys(collected, each)) == 1
        ran = {start["id"] for start in of_keys(starts, each)}
        assert bool(ran) == (each != busy), "somebody had the lock"
        for part, value in zip(result.parent.results, values[each], strict=True):
            skip = Skipped.of(value)
            assert (skip is None) == (part.id in ran)
            if skip is None:
                assert value == part.id
            else:
                assert (skip.key, skip.task_id) == (each, part.id)


def test_requeues_use_up_no_retry(cluster: Cluster, key: str) -> None:
    """With ``max_retries`` of two, five requeues leave two retries."""
    assert jobs.requeued.max_retries == 2
    with cluster.lock(key):
        sent = chord([jobs.requeued.s(key, then="retry once"), jobs.requeued.s(key)])(collect(key))
        parts: list[AsyncResult] = sent.parent.results
        for part in parts:
            cluster.wait_event("requeued", part, 5)

    assert sent.get(timeout=WAIT) == [1, parts[1].id]
    starts = cluster.events(what="start", id=parts[0].id)
    assert [start["retries"] for start in starts] == [0, 1]
    (start,) = cluster.events(what="start", id=parts[1].id)
    assert start["retries"] == 0


def test_a_group_keeps_its_order(cluster: Cluster, key: str) -> None:
    sent: GroupResult = group(members(key) * MEMBERS).apply_async()

    assert sent.get(timeout=WAIT) == [part.id for part in sent.results]
    assert_each_once(cluster, [key], MEMBERS * MEMBERS)


def test_links_of_a_chain_do_not_meet_the_lock_of_the_one_before(
    cluster: Cluster, key: str
) -> None:
    """The next link is sent when the lock is free already: it is never in its own way."""
    sent = [chain(*members(f"{key}:{number}")).apply_async() for number in range(AT_A_TIME)]
    for each in sent:
        each.get(timeout=WAIT)

    keys = [f"{key}:{number}" for number in range(AT_A_TIME)]
    assert_each_once(cluster, keys, MEMBERS)
    assert not [event for event in cluster.events(what="requeued") if event["key"] in keys]
