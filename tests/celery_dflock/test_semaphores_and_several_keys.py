"""Other locks than one on one key, and options of a call."""

from __future__ import annotations

from pathlib import Path

import pytest
from celery.exceptions import ImproperlyConfigured

from celery_dflock import Skipped
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster

pytestmark = pytest.mark.usefixtures("workers")


def test_several_keys_are_taken_together_in_one_order(cluster: Cluster, key: str) -> None:
    first, second = f"{key}:a", f"{key}:b"
    with cluster.lock(second):
        sent = cluster.send(jobs.two_keys, key)
        # The first in order is taken, whatever the order in which the task names them.
        cluster.wait_waiters(second, 1)
        assert not cluster.lock(first).acquire()
        assert not cluster.events(what="start", id=sent.id)

    assert sent.get(timeout=PATIENCE) == sent.id
    assert cluster.wait_event("end", sent)["held"] is True
    cluster.wait_free(first)
    cluster.wait_free(second)


def test_several_keys_are_all_given_back_when_one_is_not_granted(
    cluster: Cluster, key: str
) -> None:
    with cluster.lock(f"{key}:b"):
        headers = {"dflock": {"lock_timeout": 0, "lock_conflict": "skip"}}
        sent = cluster.send(jobs.two_keys, key, headers=headers)
        skipped = Skipped.of(sent.get(timeout=PATIENCE))

        assert skipped is not None
        assert skipped.key == f"{key}:b"
        with cluster.lock(f"{key}:a"):
            pass


def test_two_at_once(cluster: Cluster, key: str, tmp_path: Path) -> None:
    gates = [tmp_path / str(number) for number in range(3)]
    sent = [cluster.send(jobs.by_twos, key, gate=str(gate)) for gate in gates]
    running = cluster.wait(
        lambda: started if len(started := started_of(cluster, key)) == 2 else None, "two runs"
    )
    third = next(result for result in sent if result.id not in running)
    cluster.wait_event("asked", third)
    assert len(started_of(cluster, key)) == 2

    for gate in gates:
        gate.touch()
    for result in sent:
        result.get(timeout=PATIENCE)
    ends = [cluster.wait_event("end", result)["at"] for result in sent if result is not third]
    assert cluster.wait_event("start", third)["at"] >= min(ends)


def started_of(cluster: Cluster, key: str) -> list[str]:
    return [event["id"] for event in cluster.events(what="start", key=key)]


def test_singleton_whatever_the_arguments(cluster: Cluster, key: str, gate: Path) -> None:
    first = cluster.send(jobs.singleton, key, gate=str(gate))
    cluster.wait_event("start", first)
    second = cluster.send(jobs.singleton, f"{key}:other")

    skipped = Skipped.of(second.get(timeout=PATIENCE))
    gate.touch()

    assert skipped is not None
    assert skipped.key == "singleton"
    assert first.get(timeout=PATIENCE) == first.id


def test_a_function_decides_about_a_conflict(cluster: Cluster, key: str) -> None:
    with cluster.lock(key):
        sent = cluster.send(jobs.decided, key)

        assert sent.get(timeout=PATIENCE) == f"instead of {key}"


def test_options_of_a_call_stay_with_it_when_it_is_requeued(cluster: Cluster, key: str) -> None:
    headers = {"dflock": {"lock_key": "{key}:own", "lock_timeout": 0}}
    with cluster.lock(f"{key}:own"):
        sent = cluster.send(jobs.patient, key, headers=headers)
        cluster.wait_event("requeued", sent, 2)

    assert sent.get(timeout=PATIENCE) == sent.id
    assert {event["key"] for event in cluster.events(what="requeued", id=sent.id)} == {f"{key}:own"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"lock_timeot": 0}, "the option lock_timeot: give one of .* (did you mean lock_timeout?)"),
        ({"lock_ttl": "long"}, "lock_ttl is 'long': give whole seconds, 1 or more"),
    ],
)
@pytest.mark.parametrize("by_name", [False, True], ids=["known here", "by name"])
def test_bad_options_of_a_call_are_refused(
    cluster: Cluster, key: str, given: dict[str, object], line: str, by_name: bool
) -> None:
    said = line.replace("(", r"\(").replace("?)", r"\?\)")
    headers = {"dflock": given}

    def send() -> None:
        if not by_name:
            cluster.send(jobs.patient, key, headers=headers)
            return
        # The sender does not know what the options may be, the worker does.
        sent = jobs.app.send_task("patient", (), {"key": key}, headers=headers)
        sent.get(timeout=PATIENCE)

    with pytest.raises(ImproperlyConfigured, match=said):
        send()
    assert not cluster.events(what="start", key=key)


def test_who_holds_it(cluster: Cluster, key: str, gate: Path) -> None:
    holder = cluster.send(jobs.patient, key, gate=str(gate))
    start = cluster.wait_event("start", holder)
    waiting = cluster.send(jobs.patient, key)
    cluster.wait_waiters(key, 1)

    report = cluster.lock(key).inspect()
    skipped = Skipped.of(cluster.send(jobs.skipped, key).get(timeout=PATIENCE))
    gate.touch()

    assert report["holders"][0]["label"].startswith(f"patient[{holder.id}] ")
    assert report["holders"][0]["label"].endswith(f" pid {start['pid']}")
    assert report["waiters"][0]["label"].startswith(f"patient[{waiting.id}] ")
    assert skipped is not None
    assert skipped.holder is not None
    assert skipped.holder.startswith(report["holders"][0]["label"])
    waiting.get(timeout=PATIENCE)
