"""``lock_conflict="supersede"``: the newest wins, and each other one ends with a result."""

from __future__ import annotations

import contextlib
import pickle
import random
import time

import pytest
from celery import Celery, chord, group, states
from celery.exceptions import ChordError, ImproperlyConfigured, TaskRevokedError
from celery.result import AsyncResult, allow_join_result

from celery_dflock import LockedTask, LockKeyError, Skipped, SupersededError
from celery_dflock.outcome import header
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, waiters


def ended(cluster: Cluster, sent: AsyncResult) -> str:
    """The state in which a task has ended."""
    cluster.wait(lambda: sent.ready() or None, f"the end of {sent.id}")
    return str(sent.state)


def assert_revoked(cluster: Cluster, sent: AsyncResult, by: AsyncResult) -> None:
    assert ended(cluster, sent) == states.REVOKED
    assert isinstance(sent.result, TaskRevokedError)
    assert str(sent.result).startswith("superseded by latest")
    assert by.id in str(sent.result)


@pytest.mark.usefixtures("workers")
def test_the_newest_interrupts_who_runs_and_has_the_lock_then(
    cluster: Cluster, key: str, never: str
) -> None:
    older = cluster.send(jobs.latest, key, gate=never)
    cluster.wait_event("start", older)
    newer = cluster.send(jobs.latest, key)
    assert newer.get(timeout=PATIENCE) == newer.id
    assert_revoked(cluster, older, newer)
    end = cluster.wait_event("end", older)
    assert end["error"] == "SupersededError"
    assert end["at"] < cluster.wait_event("start", newer)["at"]
    told = cluster.wait_event("superseded", older)
    assert (told["key"], told["was_running"]) == (key, True)
    assert newer.id in told["by"]
    # It ends: neither Celery nor the plugin sends it again.
    assert len(cluster.events(what="start", id=older.id)) == 1
    assert cluster.events(what="requeued", id=older.id) == []


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("task", [jobs.latest, jobs.latest_parked], ids=["slot", "consumer"])
def test_who_waits_and_is_older_is_skipped(cluster: Cluster, key: str, task: LockedTask) -> None:
    with cluster.lock(key):
        older = cluster.send(task, key)
        cluster.wait_waiters(key, 1)
        newer = cluster.send(task, key)
        assert ended(cluster, older) == states.SUCCESS
        skipped = Skipped.of(older.result)
        assert skipped is not None
        assert newer.id in (skipped.superseded_by or "")
        cluster.wait_waiters(key, 1)
    assert newer.get(timeout=PATIENCE) == newer.id
    assert cluster.events(what="start", id=older.id) == []


@pytest.mark.usefixtures("workers")
def test_an_older_one_that_comes_later_never_stops_the_newest(
    cluster: Cluster, key: str, never: str
) -> None:
    # Drawn as it would be by a message that takes long to arrive.
    first = cluster.send(jobs.latest, key, queue=jobs.ASIDE)
    newest = cluster.send(jobs.latest, key, gate=never, queue="one")
    cluster.wait_event("start", newest)
    message = jobs.app.backend.client.lpop(jobs.ASIDE)
    assert message is not None
    jobs.app.backend.client.lpush("two", message)
    assert Skipped.of(first.get(timeout=PATIENCE)) is not None
    assert cluster.events(what="end", id=newest.id) == []
    last = cluster.send(jobs.latest, key)
    assert last.get(timeout=PATIENCE) == last.id
    assert_revoked(cluster, newest, last)


@pytest.mark.usefixtures("workers")
def test_a_message_without_a_number_gets_one_where_it_arrives(
    cluster: Cluster, key: str, never: str
) -> None:
    older = jobs.app.send_task("latest", (), {"key": key, "gate": never}, queue="one")
    cluster.wait_event("start", older)
    newer = jobs.app.send_task("latest_parked", (), {"key": key}, queue="two")
    assert newer.get(timeout=PATIENCE) == newer.id
    assert_revoked(cluster, older, newer)


@pytest.mark.usefixtures("workers")
def test_who_does_not_get_the_lock_in_time_does_as_the_second_word_says(
    cluster: Cluster, key: str
) -> None:
    with cluster.lock(key):  # which takes no part, and does not stop
        skipped = cluster.send(jobs.latest_skipped, key)
        assert Skipped.of(skipped.get(timeout=PATIENCE)) is not None
    assert skipped.result.get("superseded_by") is None


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("task", ["latest", "latest_parked", "latest_late"])
def test_a_chord_does_not_hang(cluster: Cluster, key: str, task: str, never: str) -> None:
    member = jobs.app.tasks[task]
    collect = jobs.collect.s(key=key)
    with cluster.lock(key):
        header_ = group(member.s(key=key) for _ in range(3))
        sent = chord(header_)(collect)
    with allow_join_result():
        # One ran; those that were skipped are results as any, one that was stopped fails it.
        try:
            assert len(sent.get(timeout=PATIENCE)) == 3
        except (ChordError, TaskRevokedError) as exc:
            how = str(exc)
        else:
            how = "superseded by nobody"
    assert "superseded by" in how

    first = chord([member.s(key=key, gate=never)])(collect)
    cluster.wait(
        lambda: (
            [e for e in cluster.events(what="start", key=key) if e["kwargs"].get("gate")] or None
        ),
        "its start",
    )
    cluster.send(jobs.latest, key).get(timeout=PATIENCE)
    with (
        allow_join_result(),
        pytest.raises((ChordError, TaskRevokedError), match="superseded by latest"),
    ):
        first.get(timeout=PATIENCE)


@pytest.mark.parametrize(
    "pool",
    [
        "threads",
        "gevent",
        pytest.param("solo", marks=pytest.mark.soak),
        pytest.param("eventlet", marks=pytest.mark.soak),
    ],
)
def test_every_pool_interrupts_as_for_a_lost_lock(
    cluster: Cluster, key: str, pool: str, never: str
) -> None:
    with contextlib.ExitStack() as running:
        for name in ("older", "newer"):
            worker = cluster.worker(f"{name}-{pool}", pool=pool)
            running.enter_context(worker)
            worker.wait_ready()
        older = cluster.send(jobs.latest, key, gate=never, queue=f"older-{pool}")
        cluster.wait_event("start", older)
        newer = cluster.send(jobs.latest, key, queue=f"newer-{pool}")
        assert newer.get(timeout=PATIENCE) == newer.id
        assert_revoked(cluster, older, newer)


@pytest.mark.usefixtures("workers")
def test_of_many_arrivals_the_last_runs_and_each_other_ends(
    cluster: Cluster, key: str, never: str
) -> None:
    arrive(cluster, key, never, 120)


@pytest.mark.soak
@pytest.mark.usefixtures("workers")
def test_of_a_thousand_arrivals_the_last_runs_and_each_other_ends(
    cluster: Cluster, key: str, never: str
) -> None:
    arrive(cluster, key, never, 1000)


def arrive(cluster: Cluster, key: str, never: str, number: int) -> None:
    """Send so many, at random, and judge what became of them by the record of the workers."""
    dice = random.Random(number)
    # Two who wait and one who runs when the next one comes, however fast the workers are.
    with cluster.lock(key):
        sent = [cluster.send(jobs.latest, key, queue=queue) for queue in ("one", "two")]
        assert ended(cluster, sent[0]) == states.SUCCESS
    sent.append(cluster.send(jobs.latest, key, gate=never))
    cluster.wait_event("start", sent[-1])
    while len(sent) < number:
        task = dice.choice([jobs.latest, jobs.latest, jobs.latest_parked, jobs.latest_late])
        queue = dice.choice(["celery", "one", "two"])
        sent.append(cluster.send(task, key, seconds=dice.uniform(0, 0.05), queue=queue))
        time.sleep(dice.choice([0, 0, 0.01, 0.05]))
    last = sent[-1]
    assert last.get(timeout=5 * PATIENCE) == last.id
    outcomes = [ended(cluster, each) for each in sent]
    assert set(outcomes) <= {states.SUCCESS, states.REVOKED}
    for each in sent:
        skipped = Skipped.of(each.result)
        assert each.state == states.REVOKED or skipped is not None or each.result == each.id
        if skipped is not None:
            assert skipped.superseded_by
    record = [e for e in cluster.events(key=key) if e["what"] in ("start", "end")]
    # Who is interrupted while it writes that it has begun comes to nothing else.
    whole = {e["id"] for e in record if e["what"] == "end"}
    cut = {each.id for each in sent if each.state == states.REVOKED} - whole
    record = [e for e in record if e["id"] not in cut]
    assert [e["what"] for e in record] == ["start", "end"] * (len(record) // 2)
    assert all(a["id"] == b["id"] for a, b in zip(record[::2], record[1::2], strict=True))
    order = {each.id: place for place, each in enumerate(sent)}
    begun = [order[e["id"]] for e in record[::2]]
    assert begun == sorted(begun), "an older one has run after a newer one"
    assert begun[-1] == number - 1
    ran = sum(each.result == each.id for each in sent)
    revoked = outcomes.count(states.REVOKED)
    print(f"{number} arrivals: {ran} ran, {revoked} revoked, {number - ran - revoked} skipped")
    assert revoked
    assert number - ran - revoked
    assert waiters(cluster.lock_server, key) in (None, 0)


# What is refused, and what is small.


PAIR = "lock_conflict is .*, newest, or a pair: 'supersede' or 'newest', and 'requeue' or"


@pytest.mark.parametrize("word", ["supersede", "newest"])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lock_limit": 2}, "lock_limit is 2: give 1, since lock_conflict is '{word}'"),
        ({"lock_key": ["a:{x}", "b:{x}"]}, "lock_key is .*: give one key, since lock_conflict is"),
        ({"lock_group": "of:{x}"}, "lock_group is 'of:{{x}}': give None, since lock_conflict is"),
        ({"lock_conflict": ("supersede", "wait")}, PAIR),
        ({"lock_conflict": ("newest", "wait")}, PAIR),
        ({"lock_conflict": ("skip", "fail")}, PAIR),
        ({"lock_conflict": "superseed"}, "did you mean supersede"),
        ({"lock_conflict": "newst"}, "did you mean newest"),
    ],
)
def test_what_cannot_be_meant_is_refused(word: str, options: dict[str, object], match: str) -> None:
    def body(x: int) -> None: ...

    with contextlib.closing(Celery("refused", set_as_current=False)) as app:
        refused = app.task(base=LockedTask, shared=False, **{"lock_conflict": word, **options})(
            body
        )
        with pytest.raises(ImproperlyConfigured, match=match.format(word=word)):
            _ = refused.name  # it is bound when it is first looked at


def test_a_function_that_gives_several_keys_is_refused_when_it_runs(cluster: Cluster) -> None:
    @jobs.app.task(
        base=LockedTask,
        lock_key=lambda *_: ["a", "b"],
        lock_conflict="supersede",
        name="several",
        shared=False,
    )
    def several() -> None: ...

    with pytest.raises(LockKeyError, match="several keys"):
        several.apply(throw=True)
    with pytest.raises(LockKeyError, match="several keys"):
        several.apply_async()


def test_a_number_is_that_of_one_task() -> None:
    headers = header.said_of("t1", {"x-tenant": "blue"}, "age", 7)
    assert headers["x-tenant"] == "blue"
    assert header.age_of(headers, "t1") == 7
    assert header.age_of(headers, "t2") == 0
    for bad in (None, {}, {header.RUN: 1}, {header.RUN: {"id": "t1", "age": "7"}}):
        assert header.age_of(bad, "t1") == 0


def test_the_error_can_be_pickled() -> None:
    error = SupersededError("k", "reports[1] is superseded by reports[2]", "reports[2]")
    again = pickle.loads(pickle.dumps(error))
    assert (again.key, again.by, str(again)) == ("k", "reports[2]", str(error))


def test_eager_tasks_take_part(cluster: Cluster, key: str) -> None:
    assert jobs.latest.apply(kwargs={"key": key}).get() is not None
