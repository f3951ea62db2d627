"""The cluster of the manual: its commands as they are printed, in their order, in one shell."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dflockd.cluster.stage import ClusterServer, FewShards, free_port
from tests.dflockd.shards.etcd_process import etcd_executable

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "cluster.md"

PATIENCE = 180.0

pytestmark = pytest.mark.timeout(2 * PATIENCE)

PRINTED = ("2379", "6388", "6389", "6390")
"""The ports of the page. They may be in use on this machine."""

MANY = "8192 served"
"""What the page waits for; with few shards servers and commands take a fraction of the time."""

PRINTED_LEASE = "DFLOCKD_CLUSTER_MAX_LEASE_TTL_S=10 DFLOCKD_DEFAULT_LEASE_TTL_S=10"
SHORTER_LEASE = PRINTED_LEASE.replace("10", "5")
"""The recovery after a crash takes that much less: it is half of what the page takes."""


def blocks() -> list[str]:
    section = PAGE.read_text().partition("\n## On one machine\n")[2].partition("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


@pytest.fixture
def ports() -> dict[str, str]:
    found: set[str] = set()
    while len(found) < len(PRINTED):
        found.add(str(free_port()))
    return dict(zip(PRINTED, sorted(found), strict=True))


@pytest.fixture
def programs(tmp_path: Path, ports: dict[str, str]) -> Path:
    """A directory with what the page takes to be installed; only etcd's ports are told from here."""
    directory = tmp_path / "bin"
    directory.mkdir()
    here, peers = f"http://127.0.0.1:{ports['2379']}", "http://127.0.0.1:0"
    flags = (
        f"--listen-client-urls {here} --advertise-client-urls {here} --listen-peer-urls {peers} "
    )
    flags += f"--initial-advertise-peer-urls {peers} --initial-cluster default={peers}"
    flags += " --unsafe-no-fsync"  # a disk that others keep busy is not what is tested
    for name, line in (
        ("etcd", f'"{etcd_executable()}" "$@" {flags}'),
        ("dflockd", f'"{sys.executable}" -m "$DFLOCKD" "$@"'),
        ("python", f'"{sys.executable}" "$@"'),
        # Each look at the cluster is a process that imports Python; nothing here is that urgent.
        ("sleep", f'"{shutil.which("sleep")}" 3'),
    ):
        program = directory / name
        program.write_text(f"#!/bin/sh\nexec {line}\n")
        program.chmod(0o755)
    return directory


@pytest.fixture(
    params=[
        pytest.param((SHORTER_LEASE, FewShards), id="shorter leases"),
        pytest.param((PRINTED_LEASE, ClusterServer), id="as printed", marks=pytest.mark.soak),
    ]
)
def answers(
    tmp_path: Path, programs: Path, ports: dict[str, str], request: pytest.FixtureRequest
) -> list[str]:
    """What each block of the page prints."""
    lease, kind = request.param
    script = "\necho @@@\n".join(blocks())
    assert PRINTED_LEASE in script
    assert script.count(MANY) == 2
    few = MANY.replace("8192", str(kind.shards))
    script = script.replace(PRINTED_LEASE, lease).replace(MANY, few)
    # All in one go: a port may have a printed one in it.
    script = re.sub("|".join(ports), lambda match: ports[match[0]], script)
    directory = tmp_path / "empty"
    directory.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DFLOCKD_")}
    shell = subprocess.Popen(
        ["sh", "-eu", "-c", script],
        cwd=directory,
        env={
            **clean,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "DFLOCKD": kind.module,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = shell.communicate(timeout=PATIENCE)
    finally:
        if shell.poll() is None or shell.returncode:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    logs = "".join(log.read_text() for log in sorted(directory.glob("[fst]*.log")))
    assert shell.returncode == 0, f"{output}\n{logs}"
    assert " ERROR " not in logs
    assert "Traceback" not in logs + output
    for printed, port in ports.items():
        output = output.replace(f":{port}", f":{printed}")
    return output.replace(few, MANY).split("@@@\n")


def test_the_commands_of_the_page(answers: list[str]) -> None:
    etcd, servers, first, stopped, again, crashed, end = answers
    assert etcd == servers == ""
    assert f" {MANY}, 0 recovering, 0 moving, 0 of servers that are gone, 0 without" in first
    assert re.search(r"^127\.0\.0\.1:6388 +\d+ +\d+  leader$", first, re.MULTILINE)
    assert re.search(
        r"^127\.0\.0\.1:63\d\d has granted invoice:7 with fence \d+$", first, re.MULTILINE
    )
    # The last of them may be on their way for a moment yet.
    assert re.search(r" 0 recovering, \d+ moving, 0 of servers that are gone, 0 without", stopped)
    assert "127.0.0.1:6390" not in stopped
    assert re.search(r"^\d+ shards moved in [\d.]+ s$", again, re.MULTILINE)
    assert re.search(r" [1-9]\d* recovering", crashed)
    assert "those that recover grant nothing for up to" in crashed
    assert end == ""


def test_the_page_says_what_it_needs() -> None:
    text = "".join(blocks())
    assert len(set(re.findall(r"--port (\d+) ", text))) == 3
    for port in re.findall(r"--port (\d+) ", text):
        assert f"--port {port} --advertise 127.0.0.1:{port}" in text
    assert "etcd --data-dir" in text
