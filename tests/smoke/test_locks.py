"""Locked tasks in worker containers, and what becomes of them when containers end."""

import itertools
import time

import pytest

from tests.smoke.tasks import KEY, LEASE

pytestmark = pytest.mark.smoke

BOUND = 120


def send(setup, seconds):
    return setup.app.send_task("section", args=[seconds])


def container_of(nodes, label):
    """The container that a label names: 'task[id] host pid 1'."""
    host = label.split()[-3]
    return next(node for node in nodes if node.container.id.startswith(host))


def take_no_more(setup, node):
    """Let a worker take no more tasks: what comes is for the others."""
    control = setup.app.control
    [name] = [name for name in control.inspect().ping() if name.endswith(node.container.id[:12])]
    [reply] = control.cancel_consumer("celery", destination=[name], reply=True, timeout=BOUND)
    assert "ok" in reply[name], reply


def assert_one_at_a_time(runs):
    runs = sorted(runs, key=lambda run: run["fence"])
    for first, second in itertools.pairwise(runs):
        assert first["ended"] <= second["began"], runs


def test_tasks_take_turns_over_two_workers(celery_setup):
    results = [send(celery_setup, 0.3) for _ in range(8)]
    runs = [result.get(timeout=BOUND) for result in results]

    assert_one_at_a_time(runs)
    nodes = celery_setup.worker_cluster
    assert {run["host"] for run in runs} == {node.container.id[:12] for node in nodes}


def test_a_killed_worker_frees_its_lock(celery_setup, celery_dflockd):
    send(celery_setup, 600)
    holder = container_of(celery_setup.worker_cluster, celery_dflockd.wait_until_locked(KEY))
    take_no_more(celery_setup, holder)
    waiter = send(celery_setup, 0)
    began = time.monotonic()

    holder.kill()
    run = waiter.get(timeout=BOUND)

    # Its connection told the server, not the end of its lease.
    assert run["began"] - began < LEASE / 2
    assert run["host"] != holder.container.id[:12]


def test_a_restarted_lock_server_has_not_forgotten(celery_setup, celery_dflockd):
    first = send(celery_setup, 20)
    holder = celery_dflockd.wait_until_locked(KEY)
    second = send(celery_setup, 0)

    celery_dflockd.kill()
    celery_dflockd.restart()

    assert celery_dflockd.holders(KEY) == [holder]
    runs = [first.get(timeout=BOUND), second.get(timeout=BOUND)]
    assert runs[0]["fence"] < runs[1]["fence"]
    assert_one_at_a_time(runs)


def test_the_other_beat_goes_on(celery_setup, celery_dflockd, first_beat, second_beat):
    beats = [first_beat, second_beat]
    key = f"celery-beat:{celery_setup.app.main}"
    sends = "Sending due task tick"
    leader = celery_dflockd.wait_until_locked(key).split()[1]
    leading = next(beat for beat in beats if beat.id.startswith(leader))
    standby = next(beat for beat in beats if beat is not leading)
    wait_for_log(leading, sends)
    assert sends not in standby.logs()

    leading.kill("KILL")

    wait_for_log(standby, sends)


def wait_for_log(container, text):
    ends = time.monotonic() + BOUND
    while text not in container.logs():
        assert time.monotonic() < ends, container.logs()
        time.sleep(0.1)
