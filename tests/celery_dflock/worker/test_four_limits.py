"""One of an account, three of a vendor, so many a second of it, and so many of all: under load.

Also with accounts that take turns at a vendor, and runs that take several of all. Workers are killed
and stopped meanwhile. The record of the runs says whether a limit was exceeded.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import Task

from celery_dflock import Lock, LockedTask
from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.bodies import LONG
from tests.celery_dflock.history import Kill, Span, most_at_once, most_within, runs_of
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.celery_dflock.record import DELIVERIES, Event, Record

ACCOUNTS, VENDORS = 6, 2
FLEET = 5
OF_VENDOR = 3
RATE, WINDOW = 8, 1.0

VISIBLE = 4.0
"""Seconds after which Redis delivers again what a worker has received and not acknowledged."""


def most_of(
    runs: Sequence[tuple[Event, float]], fields: Sequence[str], weight: Callable[[Event], int]
) -> int:
    """How much those with the same arguments took at once, where that was most."""
    spans = defaultdict(list)
    for event, end in runs:
        same = tuple(event["kwargs"][field] for field in fields)
        spans[same].append(Span(event["at"], end, weight(event)))
    return max(map(most_at_once, spans.values()))


def one(_: Event) -> int:
    return 1


def slots(event: Event) -> int:
    weight = event["kwargs"].get("weight", 1)
    return FLEET if weight == "all" else int(weight)


def judge(runs: Sequence[tuple[Event, float]], task: Task = jobs.four) -> None:
    """Each limit, over all runs."""
    account = ["account"] if task is jobs.four else ["account", "vendor"]
    assert most_of(runs, account, one) == 1
    assert most_of(runs, ["vendor"], one) <= OF_VENDOR
    assert most_of(runs, [], slots) <= FLEET
    for vendor in range(VENDORS):
        # Noted before the run begins, and after the grant: so these are as far apart at least.
        begun = [(e["acquired"], 1) for e, _ in runs if e["kwargs"]["vendor"] == vendor]
        assert most_within(begun, WINDOW) <= RATE


@pytest.fixture
def two(cluster: Cluster) -> Iterator[list[Worker]]:
    """Two workers of one queue, whose broker delivers again what has not been acknowledged."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                cluster.worker(
                    f"four-{number}",
                    queues="four",
                    concurrency=4,
                    env={jobs.VISIBILITY: str(VISIBLE), jobs.WAIT: "consumer"},
                    args=("--include", "tests.celery_dflock.deliveries"),
                )
            )
            for number in range(2)
        ]
        cluster.wait_ready(*workers)
        yield workers


@pytest.mark.parametrize("number", [120, pytest.param(1500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("task", [jobs.four, jobs.four_in_turns], ids=["four", "in_turns"])
@pytest.mark.timeout(900)
def test_none_is_exceeded_while_workers_are_killed_and_stopped(
    cluster: Cluster, two: list[Worker], key: str, task: Task, number: int
) -> None:
    go_through_faults(cluster, two, key, task, number, may_lose=True, queue="four")


def go_through_faults(
    cluster: Cluster,
    two: Sequence[Worker],
    key: str,
    task: Task,
    number: int,
    *,
    may_lose: bool,
    **route: Any,
) -> None:
    """Send so many that way, kill and stop the workers meanwhile, and judge what has run.

    From Redis kombu pops a message before it notes that it has it, and a worker that is killed in
    between takes it along. So one for each kill may be missing there, of those that nobody has
    received, and on RabbitMQ none.
    """
    dice = random.Random(number)
    weights = [1] if task is jobs.four else [1, 1, 1, 2, "all"]
    sent = [
        task.apply_async(
            kwargs={
                "key": key,
                "account": dice.randrange(ACCOUNTS),
                "vendor": dice.randrange(VENDORS),
                "seconds": dice.uniform(0, 0.15),
                "weight": dice.choice(weights),
            },
            **route,
        )
        for _ in range(number)
    ]
    kills: list[Kill] = []

    def left() -> set[str]:
        return {each.id for each in sent} - {e["id"] for e in cluster.events(what="end", key=key)}

    def ended() -> int:
        return number - len(left())

    quiet_since, unheard = time.monotonic(), set[str]()

    def all_ran() -> bool | None:
        nonlocal quiet_since, unheard
        missing = left()
        is_busy = jobs.app.backend.client.exists("four", "impatient_unacked_index")
        if not may_lose or is_busy or missing != unheard:
            quiet_since, unheard = time.monotonic(), missing
        # For a second: what has just been popped is on its way.
        return not missing or time.monotonic() > quiet_since + 1 or None

    faults = ["kill", "stop"] * max(1, number // 100)
    for count, fault in enumerate(faults):
        due = number * (count + 1) // (len(faults) + 2)
        cluster.wait(lambda due=due: ended() >= due or None, f"{due} runs", 5 * PATIENCE)
        worker = two[dice.randrange(2)]
        if fault == "kill":
            kills.append(Kill(time.monotonic(), worker.name))
            worker.kill()
            worker.start()
        else:  # for less than a lease: what it holds stays its own
            os.killpg(worker.pid, signal.SIGSTOP)
            time.sleep(0.7)
            os.killpg(worker.pid, signal.SIGCONT)
    cluster.wait(all_ran, "all runs", number / 10 * PATIENCE)
    runs, missing = list(runs_of(cluster.events(key=key), kills)), left()
    judge(runs, task)
    deliveries = Record(cluster.directory / DELIVERIES)
    assert not [each for each in missing if not was_on_its_way(deliveries, each, kills)]
    assert len(missing) <= len(kills)
    assert {e["id"] for e, _ in runs} == {each.id for each in sent} - missing
    for name in (f"{key}:fleet", *(f"{key}:vendor:{n}" for n in range(VENDORS))):
        cluster.wait_free(name)


def was_on_its_way(deliveries: Record, task_id: str, kills: Sequence[Kill]) -> bool:
    """Whether a message of a task has left Redis, as far as is known, and no worker has received it.

    That is one that was never received, of all that were sent for the task; or one that came back
    because its worker had been killed, and then met another kill.
    """
    received = deliveries.events(what="received", id=task_id)
    sent = 1 + len(deliveries.events(what="sent", id=task_id))  # by this test, and by workers
    if len({event["tag"] for event in received}) < sent:
        return True
    last = received[-1]
    ends = [kill.at for kill in kills if kill.worker == last["worker"] and kill.at > last["at"]]
    back = max([last["at"] + VISIBLE, *ends[:1]])
    return bool(ends) and any(kill.at > back for kill in kills)


@pytest.mark.parametrize(
    ("task", "waiting"),
    [
        (jobs.four, {"account:0": 23, "account:1": 1, "account:2": 1, "account:3": 1}),
        (jobs.four_in_turns, {"vendor:0": 27}),
    ],
    ids=["four", "in_turns"],
)
def test_small_tenants_do_not_wait_for_all_of_a_large_one(
    cluster: Cluster,
    two: list[Worker],
    key: str,
    gate: Path,
    task: Task,
    waiting: dict[str, int],
) -> None:
    def send(account: int) -> str:
        kwargs = {"key": key, "account": account, "vendor": 0, "weight": 1, "gate": str(gate)}
        return str(task.apply_async(kwargs=kwargs, queue="four").id)

    large = {send(0) for _ in range(24)}
    cluster.wait(lambda: cluster.events(what="start", key=key) or None, "the first run")
    small = {send(account) for account in (1, 2, 3) for _ in range(2)}
    for lock, number in waiting.items():  # what is still on its way waits for nobody's turn
        cluster.wait_waiters(f"{key}:{lock}", number)
    gate.touch()
    ended = cluster.wait(
        lambda: (
            ends if len(ends := cluster.events(what="end", key=key)) == len(large | small) else None
        ),
        "all runs",
    )
    order = [event["id"] in small for event in ended]
    last = len(order) - order[::-1].index(True)
    assert last - len(small) < len(large) / 2, order
    judge(list(runs_of(cluster.events(key=key), [])), task)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", ["account", "vendor", "rate", "fleet"])
def test_each_is_used_while_there_is_demand(
    cluster: Cluster, two: list[Worker], key: str, which: str
) -> None:
    """That one which binds, by how it is sent; the others have room."""
    accounts, vendors, seconds, number, most = {
        "account": (1, 1, 0.3, 40, 1.0),
        "vendor": (20, 1, 0.6, 60, OF_VENDOR),
        "rate": (20, 1, 0.0, 120, RATE / WINDOW),
        "fleet": (20, 2, 1.5, 60, FLEET),
    }[which]
    for count in range(number):
        kwargs = {"key": key, "account": count % accounts, "vendor": count % vendors}
        jobs.four.apply_async(kwargs={**kwargs, "seconds": seconds}, queue="four")
    cluster.wait(
        lambda: len(cluster.events(what="end", key=key)) == number or None, "all", 5 * PATIENCE
    )
    runs = list(runs_of(cluster.events(key=key), []))
    judge(runs)
    starts = sorted(e["at"] for e, _ in runs)
    # The last ones find no others beside them: while there is demand.
    until = starts[-FLEET - 1]
    span = until - starts[0]
    if which == "rate":
        used = sum(at < until for at in starts) / span / most
    else:
        used = sum(min(end, until) - min(e["at"], until) for e, end in runs) / span / most
    print(f"{which}: {used:.3f} used")
    assert used > 0.9


def test_the_task_is_that_of_the_manual() -> None:
    assert isinstance(jobs.four, LockedTask)
    assert jobs.four.lock_key == [
        Lock("{key}:account:{account}"),
        Lock("{key}:vendor:{vendor}", limit=OF_VENDOR, rate=(RATE, WINDOW)),
        Lock("{key}:fleet", limit=FLEET),
    ]
    assert jobs.four.lock_timeout == LONG
