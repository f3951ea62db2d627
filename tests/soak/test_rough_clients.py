"""Minutes of rough use: the clients of `make chaos`, kill -9 among them, leave nothing in a server.

``SOAK_SECONDS`` (default 600) says how long, ``SOAK_SEED`` repeats a run's choices.
"""

import json
import os
import random
import socket
import time
from contextlib import ExitStack

import psutil
import pytest

from examples.demo import stage
from tests.chaos.checker import check
from tests.chaos.history import Recorder, read
from tests.chaos.options import HISTORY, Options
from tests.chaos.processes import Client
from tests.dflockd.raw_server import RawClient

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
SEED = int(os.environ.get("SOAK_SEED") or time.time_ns() % 1_000_000)
CLIENTS = 6

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SECONDS + 300)]


def settled(server: stage.LockServer, process: psutil.Process, base: int):
    """The server's stats once everybody has gone."""

    def probe():
        client = RawClient(socket.create_connection((server.host, server.port)))
        stats = json.loads(client.ask("stats").removeprefix("ok "))
        client.close()
        gone = stats["connections"] == 1 and not stats["locks"] and not stats["semaphores"]
        return stats if gone and process.num_fds() <= base + 1 else None

    return stage.wait_until(probe, 20, lambda: f"something is left: {process.num_fds()} fds")


def test_rough_clients_leave_nothing_behind(tmp_path):
    print(f"SOAK_SEED={SEED}")
    chance = random.Random(SEED)
    options = Options(directory=tmp_path, seed=SEED, work=0.01, aside=0.01)
    recorder = Recorder(tmp_path / HISTORY)
    with stage.LockServer(tmp_path, "--read-timeout", "2") as server, ExitStack() as running:
        process = psutil.Process(server.pid)
        base = process.num_fds()
        clients = [
            running.enter_context(Client(options, number, server.address))
            for number in range(CLIENTS)
        ]
        memory = []
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            time.sleep(chance.random() * 2)  # the pace of the kills, nothing waits for it
            client = chance.choice(clients)
            dead = {"pid": client.pid, "group": client.pid}
            recorder.note("died", **dead)  # before, because nothing of it is certain any more
            client.kill()
            recorder.note("died", **dead)
            client.start()
            memory.append(process.memory_info().rss)
        for client in clients:
            client.stop()
        stats = settled(server, process, base)
        log = server.log_text()

    events = read(tmp_path / HISTORY)
    assert check(events) == []
    sections = sum(event.what == "begin" for event in events)
    early, late = max(memory[: len(memory) // 3]), max(memory[-len(memory) // 3 :])
    print(
        f"{sections} critical sections, {len(memory)} clients killed, "
        f"server {early >> 20} MiB at first, {late >> 20} MiB at last, left: {stats}"
    )
    assert sections > SECONDS * 10
    assert "Traceback" not in log
    assert late < early * 1.3 + (4 << 20), "the server's memory grows"
