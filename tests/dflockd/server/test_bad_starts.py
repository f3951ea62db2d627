"""Whatever a setting has as its value: the server starts, or says in one line why it does not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dflockd.config import SETTINGS
from tests import forkserver
from tests.dflockd.raw_server import PATIENCE

STRANGE = [
    "",
    " ",
    "0",
    "-1",
    "1e9",
    "9" * 30,
    "\u0661",
    "a b",
    "a\nb",
    "\udcff",
    "x" * 5000,
    "%s",
    "~",
]
PATHS = ["/", ".", "..", "/dev/null", "/dev/zero", "/proc/self/mem", "/nowhere/x", "x" * 300]
MADE = ["folder", "pipe", "empty", "bytes", "nested", "line", "loop", "dangling", "socket", "full"]
"""What lies in the folder of the test."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("bad")
    (path / "folder").mkdir()
    os.mkfifo(path / "pipe")
    (path / "empty").touch()
    (path / "bytes").write_bytes(bytes(range(256)) * 9)
    (path / "nested").write_text("[" * 100_000)
    (path / "line").write_text("a line\n")
    (path / "loop").symlink_to("loop")
    (path / "dangling").symlink_to("nothing")
    (path / "full").mkdir()
    (path / "full" / "state.json").write_text("[" * 100_000)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path / "socket"))
        yield path


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    """A port that somebody else listens at: so no start succeeds."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


VALUES = st.one_of(
    st.sampled_from(STRANGE + PATHS + [f"@{name}" for name in MADE]),
    st.text(st.characters(exclude_characters="\0"), max_size=20),
)
CHOSEN = st.lists(
    st.tuples(st.sampled_from([each.name for each in SETTINGS]), VALUES),
    min_size=1,
    max_size=2,
    unique_by=lambda pair: pair[0],
)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=CHOSEN)
def test_a_bad_start_is_one_line(chosen: list[tuple[str, str]], place: Path, taken: int) -> None:
    flags = ["--host", "127.0.0.1", "--port", str(taken), "--log-level", "error"]
    for name, value in chosen:
        if name in ("host", "port", "log_level"):
            continue
        text = str(place / value[1:]) if value[:1] == "@" and value[1:] in MADE else value
        flags.append(f"--{name.replace('_', '-')}={text}")
    process = forkserver.start(
        [sys.executable, "-m", "dflockd", *flags],
        stderr=subprocess.PIPE,
        cwd=place / "folder",
        env={name: text for name, text in os.environ.items() if not name.startswith("DFLOCKD_")},
    )
    try:
        status = process.wait(PATIENCE)
    finally:
        process.kill()
    with process.stderr:
        lines = process.stderr.read().decode(errors="replace").splitlines()
    assert status in (1, 2), (flags, lines)
    assert len(lines) == 1, (flags, lines)


@pytest.mark.parametrize(
    ("fails", "status", "line"),
    [
        ("load", 2, "dflockd: cannot start: KeyError: 'in two lines'"),
        ("LockTable", 1, "CRITICAL dflockd: stopped: KeyError: 'in two lines'"),
    ],
)
@pytest.mark.parametrize("level", ["error", "debug"])
def test_what_nobody_has_thought_of_is_one_line_too(
    fails: str, status: int, line: str, level: str
) -> None:
    planted = (
        "import sys; from dflockd import cli\n"
        "def broken(*_, **__): raise KeyError('in two\\x20lines')\n"
        f"cli.{fails} = broken; sys.exit(cli.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", planted, "--port", "0", "--host", "127.0.0.1", "--log-level", level],
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == status
    first, *more = done.stderr.splitlines()
    assert first.endswith(line)
    assert bool(more) is (fails == "LockTable" and level == "debug")
