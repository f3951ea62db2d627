"""No grant without a slot: tasks that wait for the same locks in all ways at once never stand still.

A mixture is some kinds of tasks, see `mixed`: short ones that share two keys, in a random order. What
holds a key runs; so there is always one that goes on, and all end about as soon as one after another.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import pytest
from celery import Task

from examples.demo.stage import LockServer, Worker
from tests.celery_dflock import mixed

SECONDS = 0.01
"""How long one task works."""
EACH = 4
"""How many tasks of each kind there are in a mixture."""
POLL = 0.02
BOUND = 60.0
"""Seconds for one mixture on a busy machine; far below what those take that stand still."""

Mixture = tuple[Task, ...]

PAIRS: list[Mixture] = list(combinations(mixed.KINDS, 2))
TRIPLES: list[Mixture] = list(combinations(mixed.KINDS, 3))
EVERYTHING: Mixture = tuple(mixed.KINDS)
FEW: list[Mixture] = [
    (mixed.slot, mixed.consumer),
    (mixed.consumer, mixed.two_consumer),
    (mixed.consumer, mixed.unlocked),
    (mixed.consumer, mixed.nested_consumer),
    (mixed.crowd_slot, mixed.crowd_consumer),
    EVERYTHING,
]

# A pool, its concurrency, how many workers, and the mixtures they are tried with.
QUICK = [
    ("prefork", 1, 1, FEW),
    ("prefork", 2, 1, FEW),
    ("threads", 2, 1, FEW),
    ("gevent", 3, 1, FEW),
    ("solo", 1, 1, FEW[:2]),
]
THOROUGH = [
    *(("prefork", n, 1, PAIRS) for n in (1, 2, 3)),
    *((pool, n, 1, PAIRS) for pool in ("threads", "gevent") for n in (1, 2, 3)),
    *((pool, 2, 1, TRIPLES) for pool in ("prefork", "threads", "gevent")),
    ("solo", 1, 1, PAIRS + TRIPLES),
    ("prefork", 1, 2, PAIRS + TRIPLES),
    ("gevent", 2, 2, PAIRS),
]
SOAK_BOUND = 1200


def cases() -> Iterator[object]:
    for marks, places in (((), QUICK), ((pytest.mark.soak,), THOROUGH)):
        for pool, concurrency, number, mixtures in places:
            name = f"{number} x {pool} -c {concurrency}, {len(mixtures)} mixtures"
            bound = [pytest.mark.timeout(SOAK_BOUND)] if marks else []
            yield pytest.param(pool, concurrency, number, mixtures, id=name, marks=[*marks, *bound])


@pytest.fixture
def start(
    tmp_path: Path, redis_url: str, lock_server: LockServer
) -> Iterator[Callable[[str, int, int], list[Worker]]]:
    """Start workers that serve the queue of this test alone."""
    record = str(tmp_path / "record.jsonl")
    env = {mixed.BROKER: redis_url, mixed.RECORD: record, "DFLOCK_SERVERS": lock_server.address}
    mixed.configure(redis_url)
    with ExitStack() as running:

        def workers(pool: str, concurrency: int, number: int) -> list[Worker]:
            options = {"pool": pool, "concurrency": concurrency, "env": env}
            started = [
                running.enter_context(
                    Worker(
                        tmp_path,
                        *("-Q", str(tmp_path)),
                        app=mixed.__name__,
                        name=f"w{n}",
                        **options,
                    )
                )
                for n in range(number)
            ]
            for worker in started:
                worker.wait_ready()
            return started

        yield workers


@pytest.mark.parametrize(("pool", "concurrency", "number", "mixtures"), list(cases()))
def test_no_mixture_stands_still(
    pool: str,
    concurrency: int,
    number: int,
    mixtures: list[Mixture],
    start: Callable[[str, int, int], list[Worker]],
    tmp_path: Path,
) -> None:
    workers = start(pool, concurrency, number)
    record = tmp_path / "record.jsonl"
    for mixture in mixtures:
        why = run(mixture, str(tmp_path), record)
        assert not why, "\n".join([why, *(worker.with_log(worker.name) for worker in workers)])
    events = mixed.history(record)
    assert len(events) == 2 * sum(map(len, map(tasks_of, mixtures)))
    assert not mixed.violations(events)


def tasks_of(mixture: Mixture) -> list[tuple[Task, list[str]]]:
    """The tasks of a mixture with their keys, in an order that the mixture decides."""
    named = "+".join(task.name for task in mixture)
    chance = random.Random(named)
    pair = [f"{named}:a", f"{named}:b"]
    tasks = []
    for task in mixture:
        for _ in range(EACH):
            keys = pair if mixed.KEYS_OF.get(task, 1) == 2 else [chance.choice(pair)]
            tasks.append((task, keys))
    chance.shuffle(tasks)
    return tasks


def run(mixture: Mixture, queue: str, record: Path) -> str:
    """Send the tasks of a mixture and wait for them; say how it stands still, if it does."""
    tasks = tasks_of(mixture)
    deadline = time.monotonic() + BOUND
    left = {
        task.apply_async((keys, SECONDS), queue=queue).id: f"{task.name}({', '.join(keys)})"
        for task, keys in tasks
    }
    while time.monotonic() < deadline:
        for event in mixed.history(record, "end"):
            left.pop(event["id"], None)
        if not left:
            return ""
        time.sleep(POLL)
    names = ", ".join(left.values())
    return f"{len(left)} of {len(tasks)} did not end within {BOUND:.0f} s: {names}"


def test_the_history_is_judged() -> None:
    def event(what: str, at: float, task_id: str, limit: int = 1) -> dict[str, object]:
        run = {"id": task_id, "retries": 0}
        return {"what": what, "at": at, **run, "holds": ["k"], "limit": limit}

    fine = [
        event("begin", 1, "x"),
        event("end", 2, "x"),
        event("begin", 2, "y"),
        event("end", 3, "y"),
    ]
    assert mixed.violations(fine) == []
    both = [
        event("begin", 1, "x"),
        event("begin", 2, "y"),
        event("end", 3, "x"),
        event("end", 4, "y"),
    ]
    assert mixed.violations(both) == ["2 holders of k, limit 1"]
    assert mixed.violations([{**e, "limit": 2} for e in both]) == []
    again = [*fine, event("begin", 5, "x"), event("end", 6, "x")]
    assert mixed.violations(again) == ["x ran 2 times"]
