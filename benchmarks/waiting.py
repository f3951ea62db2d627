"""``python -m benchmarks.waiting``: what those who wait for one lock cost those who do not.

A worker of two processes, with Celery's default settings, finds 600 messages in its queue, by turns
one for the same key, which somebody else holds, and one with a key of its own. The holder lets go
once those 300 others are done, or after `HELD` seconds. Then the first 300 follow. They wait

- in the consumer (``lock_wait="consumer"``);
- in its slot (``lock_timeout=None``);
- by being sent again (``lock_conflict="requeue"``, ``lock_timeout=0``, the default pauses);
- in its slot for a redis-py `Lock`, with its default of a try each 0.1 s.

Each way is run without the 300 that wait as well. Figures are medians over the rounds:

- *others*: from the begin of the first of the others to the end of the last, in seconds, and that of
  the run without those who wait as a share of it: 1.0 is not slowed at all.
- *the 300*: from the moment the key is free to the end of the last of them, in seconds.
- *overtaken*: how many of the 300 began after one that was sent later.
- *sent again*: messages that the requeueing made.
- *memory*: what the main process of the worker has at most, in MiB, and how much more than without.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import redis
from celery import Task
from rich.console import Console
from rich.table import Table

from benchmarks import waiting_jobs as jobs
from dflockd.sync_client import DistributedLock
from examples.demo import stage

RESULTS = Path(__file__).parent / "waiting.json"
WAYS = {
    "in the consumer": jobs.consumer,
    "in the slot": jobs.slot,
    "requeue": jobs.requeue,
    "redis-py Lock": jobs.redis_lock,
}
HOT = "hot"
HELD = 15.0
"""Seconds after which the holder lets go at the latest."""
PATIENCE = 900.0

Figures = dict[str, float]


class Round:
    """One run of one way: a worker, a queue, a record."""

    def __init__(self, directory: Path, redis_server: stage.Redis, locks: stage.LockServer) -> None:
        self._directory = directory
        self._socket = redis_server.socket
        self._locks = locks

    def run(self, task: Task, others: int, waiting: int, seconds: float) -> Figures:
        with tempfile.TemporaryDirectory(dir=self._directory) as name:
            record = Path(name) / "record.jsonl"
            client = redis.Redis(unix_socket_path=str(self._socket))
            client.flushall()
            env = {jobs.SOCKET: str(self._socket), jobs.RECORD: str(record)}
            jobs.configure(env)
            env["DFLOCK_SERVERS"] = self._locks.address
            free = self._hold(task, client)
            for number in range(max(others, waiting)):
                if number < waiting:
                    task.apply_async((HOT, number, seconds))
                if number < others:
                    task.apply_async((f"own:{number}", number, seconds))
            with stage.Worker(Path(name), app="benchmarks.waiting_jobs", env=env) as worker:
                memory = _Memory(worker.pid)
                with contextlib.suppress(stage.StageError):
                    _wait_ended(record, lambda event: event["key"] != HOT, others, HELD)
                freed_at = time.monotonic()
                free()
                _wait_ended(record, lambda _: True, others + waiting, PATIENCE)
                mebibytes = memory.stop()
            events = _read(record)
        own = [e for e in events if e["what"] != "requeued" and e["key"] != HOT]
        hot = [e for e in events if e["what"] != "requeued" and e["key"] == HOT]
        turns = [e["number"] for e in hot if e["what"] == "begin"]
        return {
            "others": max(e["at"] for e in own) - min(e["at"] for e in own),
            "the 300": max((e["at"] for e in hot), default=freed_at) - freed_at,
            "overtaken": float(_overtaken(turns)),
            "sent again": float(sum(e["what"] == "requeued" for e in events)),
            "memory": mebibytes,
        }

    def _hold(self, task: Task, client: Any) -> Callable[[], object]:
        if task is jobs.redis_lock:
            other = client.lock(HOT, timeout=300)
            other.acquire()
            return other.release  # type: ignore[no-any-return]
        lock = DistributedLock(HOT, servers=[self._locks.address])
        lock.acquire()
        return lock.release


class _Memory:
    """The most that a process has, looked at all the time."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            with contextlib.suppress(psutil.Error):
                self._most = max(self._most, self._process.memory_info().rss)

    def stop(self) -> float:
        self._over.set()
        self._thread.join()
        return self._most / (1 << 20)


def _read(record: Path) -> list[dict[str, Any]]:
    lines = record.read_text().splitlines() if record.exists() else []
    return [json.loads(line) for line in lines]


def _wait_ended(
    record: Path, wanted: Callable[[dict[str, Any]], bool], number: int, seconds: float
) -> None:
    def probe() -> bool | None:
        time.sleep(0.05)
        ended = (event for event in _read(record) if event["what"] == "end")
        return sum(map(wanted, ended)) >= number or None

    stage.wait_until(probe, seconds, lambda: f"{number} tasks did not end in {seconds:g} s")


def _overtaken(turns: list[int]) -> int:
    latest, late = -1, 0
    for number in turns:
        late += number < latest
        latest = max(latest, number)
    return late


def measure(rounds: int, number: int, seconds: float) -> dict[str, list[Figures]]:
    figures: dict[str, list[Figures]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with stage.Redis(directory) as broker, stage.LockServer(directory) as locks:
            this = Round(directory, broker, locks)
            for turn in range(rounds):
                names = list(WAYS)
                first = turn % len(names)
                for way in names[first:] + names[:first]:
                    alone = this.run(WAYS[way], number, 0, seconds)
                    beside = this.run(WAYS[way], number, number, seconds)
                    beside["others' speed"] = alone["others"] / beside["others"]
                    beside["more memory"] = beside["memory"] - alone["memory"]
                    figures[way].append(beside)
                    print(way, beside, file=sys.stderr)
    return figures


def table(figures: dict[str, list[Figures]], number: int) -> Table:
    drawn = Table(title=f"{number} tasks wait for one key, {number} others do not")
    columns = {
        "others": ".1f",
        "others' speed": ".2f",
        "the 300": ".1f",
        "overtaken": ".0f",
        "sent again": ".0f",
        "memory": ".0f",
        "more memory": ".0f",
    }
    drawn.add_column("")
    for column in columns:
        drawn.add_column(column, justify="right")
    for way, runs in figures.items():
        medians = {name: statistics.median(run[name] for run in runs) for name in columns}
        drawn.add_row(way, *(format(medians[name], style) for name, style in columns.items()))
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=0.05, help="work of one task")
    options = parser.parse_args()
    figures = measure(options.rounds, options.tasks, options.seconds)
    Console().print(table(figures, options.tasks))
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} cores",
        "python": platform.python_version(),
        "tasks": options.tasks,
        "seconds": options.seconds,
        "figures": figures,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
