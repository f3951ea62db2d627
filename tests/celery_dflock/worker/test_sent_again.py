"""A task that waits in the consumer is sent again, and something else happens meanwhile."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.celery_dflock import jobs
from tests.celery_dflock.processes import Cluster, node_of
from tests.celery_dflock.worker import sending


def slow(gate: Path) -> dict[str, Any]:
    """Options of a worker whose thread that sends again stands still until the gate is there."""
    return {"app": sending.APP, "env": {sending.SENDING: str(gate)}}


def messages(queue: str) -> list[str]:
    """The tasks whose messages the broker has, by their ids."""
    client = jobs.app.backend.client
    unacked = [json.loads(each)[0] for each in client.hvals("unacked")]
    waiting = [json.loads(each) for each in client.lrange(queue, 0, -1)]
    of_queue = [each for each in unacked if queue in each["properties"]["delivery_info"].values()]
    return [each["headers"]["id"] for each in (*waiting, *of_queue)]


def test_a_worker_that_ends_leaves_one_message(cluster: Cluster, key: str, gate: Path) -> None:
    """Not the one of before as well."""
    with cluster.lock(key):
        with cluster.ready("sending", **slow(gate)) as worker:
            sent = cluster.send(jobs.parked, key, queue=worker.name)
            cluster.wait(lambda: sending.begun(gate).exists() or None, "it to be sent again")
            os.kill(worker.pid, signal.SIGTERM)
            cluster.wait(lambda: sending.stopping(gate).exists() or None, "the worker to give up")
            gate.touch()
            cluster.wait(lambda: not worker.running or None, "the end of the worker")
        assert messages(worker.name) == [sent.id]
        jobs.app.backend.client.delete(worker.name)


def test_the_worker_knows_the_message_that_has_come_meanwhile(
    cluster: Cluster, key: str, gate: Path
) -> None:
    with cluster.lock(key), cluster.ready("sending-round", **slow(gate)) as worker:
        cluster.wait_ready(worker)
        sent = cluster.send(jobs.parked, key, queue=worker.name)
        log = worker.log_text
        cluster.wait(lambda: log().count(f"{sent.id}] received") == 2 or None, "it to come again")
        assert messages(worker.name) == [sent.id] * 2
        gate.touch()
        cluster.wait(lambda: messages(worker.name) == [sent.id] or None, "the first to be over")
        node = node_of(worker)
        assert sent.id in jobs.app.control.inspect([node], limit=1).query_task(sent.id)[node]
        sent.revoke()
        cluster.wait(lambda: messages(worker.name) == [] or None, "it to be revoked")


def test_a_receiver_that_hangs_keeps_nobody_from_being_sent_again(
    cluster: Cluster, key: str, gate: Path
) -> None:
    """What receivers are told of who waits is not on the same thread."""
    options = slow(gate)
    options["env"][jobs.SLOW] = str(jobs.LONG)
    gate.touch()
    with cluster.lock(key), cluster.ready("receiver-hangs", **options) as worker:
        sent = cluster.send(jobs.parked, key, queue=worker.name)
        log = worker.log_text
        cluster.wait(lambda: log().count(f"{sent.id}] received") > 1 or None, "it to come again")
