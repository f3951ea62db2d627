"""What is forked for a test is a process like one that was started for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forkserver
from tests.dflockd.raw_server import ServerProcess, eventually
from tests.forkserver import Forked

PROBE = """
import gc, json, os, signal, sys, threading
print(json.dumps({
    "argv": sys.argv[1:], "path": sys.path[0], "cwd": os.getcwd(), "variable": os.environ.get("SEEN"),
    "main": __name__, "is_leader": os.getpid() == os.getsid(0), "collects": gc.isenabled(),
    "threads": threading.active_count(),
    "files": [n for n in os.listdir("/dev/fd") if os.path.exists(f"/dev/fd/{n}")],
    "child": str(signal.getsignal(signal.SIGCHLD)), "wakes": signal.set_wakeup_fd(-1),
    "urgent": str(signal.getsignal(signal.SIGURG)), "alarm": str(signal.getsignal(signal.SIGTERM)),
}))
"""


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that runs a module which tells what it finds."""
    (tmp_path / "probe.py").write_text(PROBE)
    monkeypatch.setitem(forkserver.PRELOADED, "probe", ("json",))
    return [sys.executable, "-m", "probe", "--flag", "a word"]


def said(process: Any) -> dict[str, Any]:
    with process.stdout:
        found: dict[str, Any] = json.loads(process.stdout.read())
    assert process.wait(60) == 0
    return found


ELSEWHERE = {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"HERE{os.pathsep}{forkserver.ROOT}"}


@pytest.mark.parametrize("path", [{}, ELSEWHERE], ids=["path of ours", "path of its own"])
def test_it_finds_what_a_new_process_finds(
    probe: list[str], tmp_path: Path, path: dict[str, str]
) -> None:
    path = {name: value.replace("HERE", str(tmp_path)) for name, value in path.items()}
    env = {**os.environ, "SEEN": "ä", **path}
    how: dict[str, Any] = {"cwd": tmp_path, "env": env, "stdin": subprocess.DEVNULL}
    for is_leader in (False, True):
        new = subprocess.Popen(
            probe, stdout=subprocess.PIPE, text=True, start_new_session=is_leader, **how
        )
        forked = forkserver.start(
            probe, stdout=subprocess.PIPE, text=True, start_new_session=is_leader, **how
        )
        assert isinstance(forked, Forked)
        assert said(forked) == said(new)


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("sys.exit(3)", 3),
        ("raise ValueError('its traceback')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("atexit.register(lambda: print('last', file=sys.stderr))", 0),
    ],
)
def test_it_ends_as_a_new_process_ends(
    probe: list[str], tmp_path: Path, ends: str, status: int
) -> None:
    (tmp_path / "probe.py").write_text(f"import atexit, os, signal, sys\n{ends}\n")
    texts = []
    for start in (subprocess.Popen, forkserver.start):
        process = start(probe, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        with process.stderr:
            texts.append(process.stderr.read().splitlines()[-1:])
        assert process.wait(60) == process.poll() == process.returncode == status
        process.kill()  # nobody is there any more
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("command", "env"),
    [
        (["sh", "-c", "exec true"], {}),
        ([sys.executable, "-c", "pass"], {}),
        ([sys.executable, "-X", "dev", "-m", "dflockd", "--version"], {}),
        ([sys.executable, "-m", "celery", "--pool", "gevent", "--version"], {}),
        ([sys.executable, "-m", "dflockd", "--version"], {"PYTHONWARNINGS": "error"}),
        ([sys.executable, "-m", "dflockd", "--version"], {"PYTHONSAFEPATH": "1", "PYTHONPATH": ""}),
    ],
)
def test_what_it_cannot_give_is_started_anew(command: list[str], env: dict[str, str]) -> None:
    process = forkserver.start(command, env={**os.environ, **env}, stdout=subprocess.DEVNULL)
    assert isinstance(process, subprocess.Popen)
    process.wait(60)


def test_it_ends_with_whoever_asked_for_it() -> None:
    """A server that was forked goes on, as one that was started would."""
    text = """if True:
        import subprocess, sys
        from tests import forkserver
        command = [sys.executable, "-m", "dflockd", "--host", "127.0.0.1", "--port", "0"]
        process = forkserver.start(command, stderr=subprocess.PIPE, text=True)
        process.stderr.readline()
        print(process.pid, flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", text]
    with subprocess.Popen(
        command, cwd=forkserver.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        asked = server.parent()
        assert asked is not None
        process.kill()
    try:
        asked.wait(60)
        assert server.is_running()
    finally:
        server.kill()


def test_servers_are_forked() -> None:
    server = ServerProcess()
    try:
        assert isinstance(server.process, Forked)
        asked = psutil.Process(server.process.pid).parent()
        assert asked is not None
        assert asked.num_threads() == 1, "a child would not have the others"
        assert server.connect().lock("k")
        server.suspend()
        server.signal(signal.SIGCONT)
        eventually(lambda: psutil.Process(server.process.pid).status() != psutil.STATUS_STOPPED)
    finally:
        server.end()
