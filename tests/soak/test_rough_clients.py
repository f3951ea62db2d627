"""Minutes of rough use: many clients, kill -9 among them, against one server.

``SOAK_SECONDS`` (default 600) says how long, ``SOAK_SEED`` repeats a run's choices.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dflockd.wire import fence_from_token
from examples.demo import stage

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
SEED = int(os.environ.get("SOAK_SEED") or time.time_ns() % 1_000_000)
CLIENTS = 6

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SECONDS + 300)]


class Rough:
    """The clients, and when each of them was killed."""

    def __init__(self, port: int, record: Path) -> None:
        self._command = [
            sys.executable,
            str(Path(__file__).with_name("rough_client.py")),
            str(port),
        ]
        self._record = str(record)
        self._seed = SEED * 1000
        self.died: dict[int, int] = {}
        self.running = [self._start() for _ in range(CLIENTS)]

    def _start(self) -> subprocess.Popen:
        self._seed += 1
        return subprocess.Popen(
            [*self._command, str(self._seed), self._record], stderr=subprocess.DEVNULL
        )

    def kill(self, number: int) -> None:
        victim = self.running[number]
        assert victim.poll() is None, "a client ended by itself"
        self.died[victim.pid] = time.monotonic_ns()
        victim.kill()
        victim.wait()

    def replace(self, number: int) -> None:
        self.kill(number)
        self.running[number] = self._start()


def sections(record: Path, died: dict[int, int]) -> list[dict]:
    """Every critical section with its start and end; that of a killed process ends with it."""
    open_ones: dict[tuple[int, str], dict] = {}
    done = []
    for line in record.read_text().splitlines():
        event = json.loads(line)
        name = (event["pid"], event["token"])
        if event["what"] == "start":
            open_ones[name] = event
        else:
            begun = open_ones.pop(name)
            done.append({**begun, "end": event["at"]})
    for (pid, _), begun in open_ones.items():
        done.append({**begun, "end": died[pid]})
    return sorted(done, key=lambda section: section["at"])


def most_at_once(group: list[dict]) -> int:
    events = sorted([(s["at"], 1) for s in group] + [(s["end"], -1) for s in group])
    here = most = 0
    for _, step in events:
        here += step
        most = max(most, here)
    return most


def judge(done: list[dict]) -> None:
    tokens = [section["token"] for section in done]
    assert len(tokens) == len(set(tokens)), "one token for two grants"
    by_key: dict[tuple[str, int], list[dict]] = {}
    for section in done:
        by_key.setdefault((section["key"], section["limit"]), []).append(section)
    for (key, limit), group in by_key.items():
        assert most_at_once(group) <= limit, f"{key}: more than {limit} at once"
        if limit == 1:
            fences = [fence_from_token(section["token"]) for section in group]
            assert fences == sorted(fences), f"{key}: fences do not grow"


def settled(server: stage.LockServer, process: psutil.Process, base: int):
    """The server's stats once everybody has gone."""
    import socket

    def probe():
        with socket.create_connection((server.host, server.port), 5) as sock, sock.makefile() as r:
            sock.sendall(b"stats\n_\n_\n")
            stats = json.loads(r.readline()[3:])
        gone = stats["connections"] == 1 and not stats["locks"] and not stats["semaphores"]
        return stats if gone and process.num_fds() <= base + 1 else None

    return stage.wait_until(probe, 20, lambda: f"something is left: {process.num_fds()} fds")


def test_rough_clients_leave_nothing_behind(tmp_path):
    print(f"SOAK_SEED={SEED}")
    chance = random.Random(SEED)
    record = tmp_path / "record"
    with stage.LockServer(tmp_path, "--read-timeout", "2") as server:
        process = psutil.Process(server.pid)
        base = process.num_fds()
        rough = Rough(server.port, record)
        memory = []
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            time.sleep(chance.random() * 2)  # the pace of the kills, nothing waits for it
            rough.replace(chance.randrange(CLIENTS))
            memory.append(process.memory_info().rss)
        for number in range(CLIENTS):
            rough.kill(number)
        stats = settled(server, process, base)
        log = server.log_text()

    done = sections(record, rough.died)
    judge(done)
    early, late = max(memory[: len(memory) // 3]), max(memory[-len(memory) // 3 :])
    print(
        f"{len(done)} critical sections, {len(rough.died)} clients killed, "
        f"server {early >> 20} MiB at first, {late >> 20} MiB at last, left: {stats}"
    )
    assert len(done) > SECONDS * 10
    assert "Traceback" not in log
    assert late < early * 1.3 + (4 << 20), "the server's memory grows"
