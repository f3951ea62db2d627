"""How large the images are, how fast the lock server starts in one, and what it takes when idle."""

from __future__ import annotations

import re
import statistics
import time
import uuid

from dflockd.errors import DflockdError
from dflockd.sync_client import DistributedLock
from tests.smoke import engine
from tests.smoke.engine import docker

TIMES = 7
BASE = "python:3.11-slim-bookworm"

FIRST_GRANT = """
import resource, socket, subprocess, time
began = time.monotonic()
server = subprocess.Popen(["dflockd", "--host", "127.0.0.1"], stderr=subprocess.DEVNULL)
while True:
    try:
        with socket.create_connection(("127.0.0.1", 6388)) as connection:
            connection.sendall(b"l\\nkey\\n10\\n")
            assert connection.recv(99).startswith(b"ok ")
            break
    except ConnectionRefusedError:
        time.sleep(0.001)
print(time.monotonic() - began, end=" ")
server.kill()
server.wait()
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
"""


def rows() -> list[list[str]]:
    """Measure it all."""
    base, server, worker = (_size(image) for image in (BASE, engine.SERVER, engine.WORKER))
    starts = [_process_to_grant() for _ in range(TIMES)]
    inside, cpu = (statistics.median(times) for times in zip(*starts, strict=True))
    outside = statistics.median(_run_to_grant() for _ in range(TIMES))
    plain, full = (
        _memory(),
        _memory("--env=DFLOCKD_HTTP_PORT=6389", "--env=DFLOCKD_STATE_DIR=/tmp/s"),
    )
    return [
        [f"`{engine.SERVER}` beyond `{BASE}`", f"{server - base:.0f} MB"],
        [f"`{engine.WORKER}` beyond it", f"{worker - base:.0f} MB"],
        [
            "start of the process to the first grant",
            f"{inside * 1000:.0f} ms, {cpu * 1000:.0f} ms of them CPU",
        ],
        ["`docker run` to the first grant", f"{outside * 1000:.0f} ms"],
        ["memory of the idle server", f"{plain:.0f} MB"],
        ["the same with `--http-port` and `--state-dir`", f"{full:.0f} MB"],
    ]


def _size(image: str) -> float:
    return int(docker("image", "inspect", "--format", "{{.Size}}", image)) / 1e6


def _process_to_grant() -> list[float]:
    """Seconds until then, and those that the CPU had to work."""
    words = ["run", "--rm", "--read-only", "--entrypoint=python3", engine.SERVER]
    return [float(word) for word in docker(*words, "-c", FIRST_GRANT).split()]


def _run_to_grant() -> float:
    name = f"figures-{uuid.uuid4().hex[:12]}"
    began = time.monotonic()
    docker(
        "run", "--detach", "--read-only", "--publish=127.0.0.1::6388", "--name", name, engine.SERVER
    )
    try:
        server = docker("port", name, "6388/tcp").splitlines()[0]
        while True:
            try:
                with DistributedLock("key", acquire_timeout_s=1, servers=[server]):
                    return time.monotonic() - began
            except DflockdError:
                time.sleep(0.005)
    finally:
        docker("rm", "--force", name)


def _memory(*flags: str) -> float:
    """Resident megabytes of the server's process."""
    name = f"figures-{uuid.uuid4().hex[:12]}"
    docker("run", "--detach", "--read-only", "--tmpfs=/tmp", *flags, "--name", name, engine.SERVER)
    try:
        time.sleep(3)
        status = docker("exec", name, "python3", "-c", "print(open('/proc/1/status').read())")
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None, status
        return int(found[1]) / 1000
    finally:
        docker("rm", "--force", name)
