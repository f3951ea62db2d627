"""One row with real processes: its worker is ended in the middle and started again."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Connection
from redis import Redis as RedisClient

from celery_dflock import Skipped
from dflockd import admin
from examples.demo.stage import LockServer, Redis, StageError
from tests.celery_dflock import jobs
from tests.celery_dflock.combinations.judge import History, Sent, Stop
from tests.celery_dflock.combinations.pairs import Row
from tests.celery_dflock.combinations.task import ROW, TENANTS, make
from tests.celery_dflock.processes import Cluster
from tests.celery_dflock.record import RECORD
from tests.rabbitmq import RabbitMQ

NUMBER = 14
KEYS = 3
SECONDS = 0.15
"""How long a task works, of which there are many."""
LIMIT = 1
"""The time limit of one of the tasks, which would go on for much longer."""
SLOTS = {"prefork": 3, "threads": 3, "gevent": 4, "eventlet": 4, "solo": 1}
HARD = r"Hard time limit \(.*\) exceeded for \S+\[(\S+)\]"
"""What Celery logs of a task whose process it has ended."""
ENDINGS = {"warm": signal.SIGTERM, "cold": signal.SIGQUIT}
HANGS = re.compile(r"in write_frame\n.*in on_cold_shutdown\n.*in write_frame\n", re.DOTALL)
"""The stack of a worker that stands still in a cold shutdown for good, without this plugin too.

SIGQUIT came while it wrote to RabbitMQ. Celery's handler of the signal writes as well, and waits for
the lock of py-amqp (5.4) that the interrupted call has.
"""
STACK = 10.0
"""Seconds for a worker to write its stack."""


class Trial:
    """What takes part in a row."""

    def __init__(
        self, row: Row, directory: Path, rabbitmq: RabbitMQ | None, **settings: Any
    ) -> None:
        self.row = row
        self.directory = directory
        self.redis = Redis(directory)
        self.server = LockServer(directory)
        self.broker = self.redis.url if rabbitmq is None else rabbitmq.url
        name = directory.name
        kind = row["broker"] if rabbitmq is not None else "classic"
        backends = {"none": "disabled://", "redis": self.redis.url, "file": f"file://{directory}"}
        self.settings = {
            "broker_url": self.broker,
            "result_backend": backends[row["results"]],
            "task_default_queue": name,
            "task_default_queue_type": kind,
            "task_default_exchange": name,
            "task_default_exchange_type": "topic" if kind == "quorum" else "direct",
            "task_default_routing_key": name,
            **settings,
        }

    def run(self) -> History:
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            stack.enter_context(self.redis)
            stack.enter_context(self.server)
            patch.setenv("DFLOCK_SERVERS", self.server.address)
            patch.setenv(RECORD, str(self.directory / "record.jsonl"))
            self.cluster = Cluster(self.directory, self.server)
            self.app = Celery("combinations", set_as_current=False)
            self.app.conf.update(self.settings)
            stack.callback(self.app.close)
            self.task = make(self.app, self.row)
            self.worker = self.cluster.worker(
                "worker",
                queues=self.directory.name,
                app=f"{__package__}.task",
                pool=self.row["pool"],
                concurrency=SLOTS[self.row["pool"]],
                env={
                    jobs.BROKER: self.broker,
                    jobs.RESULTS: self.settings["result_backend"],
                    jobs.MORE: json.dumps(self.settings),
                    ROW: json.dumps(self.row),
                },
            )
            with self.worker:
                self.worker.wait_ready()
                return self._run()

    def _run(self) -> History:
        dice = random.Random(json.dumps(self.row))
        sent = [self._send(dice, number) for number in range(NUMBER)]
        history = History(self.row, sent, [], slots=SLOTS[self.row["pool"]])
        if self.row["end"] != "none":
            many = min(3, len(history.calls))
            self.cluster.wait(lambda: len(self._ids("asked")) >= many or None, f"{many} tasks")
            history.stop = self._end()
            self._restore()
            self.worker.start()
            self.worker.wait_ready()
        history = self._settled(history)
        history.sent += [self._send(dice, NUMBER + number) for number in range(KEYS)]
        history = self._settled(history)
        if self.row["results"] != "none":
            history.fates = {id: self._fate(id) for id in history.calls}
        self.worker.stop()
        history.left = self._left()
        return history

    def _ids(self, what: str) -> set[str]:
        return {event["id"] for event in self.cluster.events(what=what)}

    def _send(self, dice: random.Random, number: int) -> Sent:
        options: dict[str, Any] = {}
        kwargs: dict[str, Any] = {
            "key": f"k{dice.randrange(KEYS) if number < NUMBER else number - NUMBER}",
            "number": number,
            "tenant": dice.randrange(TENANTS),
            "weight": dice.choice([1, 2]),
            "seconds": SECONDS,
        }
        if self.row["time_limit"] and number == 1:
            options[{"soft": "soft_time_limit", "hard": "time_limit"}[self.row["time_limit"]]] = (
                LIMIT
            )
            kwargs["seconds"] = jobs.LONG
        elif number == 2:
            kwargs["then"] = "raise once" if self.row["retries"] else "raise"
        before = time.monotonic()
        id = self.task.apply_async((), kwargs, **options).id
        return Sent(id, kwargs, before, time.monotonic())

    def _end(self) -> Stop:
        asked = time.monotonic()
        if self.row["end"] != "kill":
            os.kill(self.worker.pid, ENDINGS[self.row["end"]])
            try:
                self.cluster.wait(lambda: not self.worker.running or None, "the end of the worker")
            except StageError:
                # Whatever else does not end is a fault. This worker has acknowledged nothing since, so
                # what its processes have sent again comes twice, and there is nothing to judge.
                os.kill(self.worker.pid, signal.SIGUSR1)  # Celery writes its stack
                self.cluster.wait(
                    lambda: HANGS.search(self.worker.log_text()), "a known hang", STACK
                )
                pytest.skip("Celery hangs in its cold shutdown")
        self.worker.kill()
        return Stop(self.worker.name, asked, time.monotonic())

    def _restore(self) -> None:
        """Have Redis deliver again what the worker has left, as it does when that is visible again."""
        if self.row["broker"] == "redis":
            options = {"visibility_timeout": 0}
            with Connection(self.broker, transport_options=options) as connection:
                connection.default_channel.qos.restore_visible(num=NUMBER * 2)

    def _settled(self, history: History) -> History:
        """Wait until nothing goes on; judge later what that leaves."""

        def probe() -> History | None:
            events = self.cluster.events()
            log = self.worker.log.read_text(errors="replace")
            # Celery ends the process, which cannot note that.
            hard = re.findall(HARD, log)
            ended = [
                {"id": id, "what": "done", "state": "FAILURE", "at": 0.0, "pid": 0} for id in hard
            ]
            now = History(self.row, history.sent, events + ended, {}, history.stop, history.slots)
            # What this worker has received, or was sent since it started, is not lost; and each copy of
            # it is looked at.
            text = self.worker.log_text()
            received = Counter(re.findall(r"Task \S+\[(\S+)\] received", text))
            since = history.stop.gone if history.stop else 0
            done = Counter(e["id"] for e in events if e["what"] == "done" and e["at"] > since)
            done.update(re.findall(HARD, text))
            ids = [
                call.id
                for call in now.calls.values()
                if not now.was_cut_off or call.before > since or call.id in received
            ]
            is_over = received <= done and all(now.over(id) is not None for id in ids)
            return now if is_over and not self._left() else None

        try:
            return self.cluster.wait(probe, "all to be over")
        except StageError:
            events = self.cluster.events()
            return History(self.row, history.sent, events, {}, history.stop, history.slots)

    def _left(self) -> list[str]:
        stats = admin.stats(self.server.address)
        keys = [lock["key"] for lock in stats["locks"] + stats["semaphores"]]
        left = [
            f"left at the lock server: {key}" for key in keys if not key.startswith(self._notes)
        ]
        if self.row["broker"] == "redis":
            with RedisClient(unix_socket_path=str(self.redis.socket)) as client:
                number = client.llen(self.directory.name) + client.hlen("unacked")
        else:  # it counts what no worker has
            with Connection(self.broker) as connection:
                channel = connection.default_channel
                number = channel.queue_declare(self.directory.name, passive=True).message_count
        return left + ([f"left in the broker: {number} messages"] if number else [])

    @property
    def _notes(self) -> tuple[str, ...]:
        """What keys begin with that are kept for a while: marks, and which redeliveries have run."""
        return ("celery-done:", *(["unique:"] if self.row["unique"] == "until_expired" else []))

    def _fate(self, id: str) -> str:
        result = self.app.AsyncResult(id)
        state, value = result.state, result.result
        if state == "FAILURE":
            return f"FAILURE {type(value).__name__}"
        if state == "SUCCESS" and value not in (id, 1):
            if Skipped.of(value) is not None:
                return "Skipped"
            return "instead" if str(value).startswith("instead") else f"SUCCESS {value}"
        return str(state)
