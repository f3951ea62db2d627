"""The first tutorial: its commands as they are printed, in an empty directory."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from examples.demo.stage import ROOT, LockServer, Redis, wait_until
from tests.quick_start import BLOCK, BOUND, Typed, completed, environment, without_times

PAGE = (ROOT / "docs" / "tutorial" / "first-lock.md").read_text()
KINDS = ["shell", "python", "shell", "shell", "shell", "text", "shell", "shell", "python"]
HELD = re.compile(r"pid (\d+)$")


def without_fences(output: str) -> list[str]:
    return without_times(re.sub(r"fence \d+", "fence N", output))


@pytest.mark.usefixtures("needs_redis")
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE)
    assert [kind for kind, _ in blocks] == KINDS
    _, tasks, _, worker, send, printed, look, kill, _ = (text for _, text in blocks)
    send_long, locks, waiters = look.splitlines()
    assert kill.splitlines() == ["kill -9 PID", locks]
    env = environment(Path(sys.executable).parent)

    def typed(line: str) -> str:
        done = completed(shlex.split(line), tmp_path, env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def held() -> tuple[str, int] | None:
        """Return who holds the lock of account 7: the task and its process."""
        for row in json.loads(typed(f"{locks} --json")):
            if row["key"] == "account:7" and (found := HELD.search(row["label"])):
                return row["label"].partition(" ")[0], int(found[1])
        return None

    with Redis(tmp_path) as redis, LockServer(tmp_path) as server:
        text = tasks.replace("redis://127.0.0.1:6379/0", redis.url)
        (tmp_path / "tasks.py").write_text(text.replace("127.0.0.1:6388", server.address))
        with Typed(tmp_path, "worker", worker, env):
            assert without_fences(typed(send)) == without_fences(printed)
            typed(send_long)
            queued = wait_until(lambda: typed(waiters) or None, BOUND, lambda: "nobody waits")
            assert re.match(r"account:7  1\. tasks\.sync_account\[", queued)
            first, process = wait_until(held, BOUND, lambda: "nobody holds the lock")
            os.kill(process, signal.SIGKILL)
            second, _ = wait_until(held, BOUND, lambda: "the second task did not get the lock")

    assert second != first
    assert second in queued


def test_you_have_time_to_look_around() -> None:
    """The task that waits would be sent again, and be nowhere when you kill the other one."""
    [task] = re.findall(r"lock_timeout=(\d+)\)\ndef sync_account", PAGE)
    [long] = re.findall(r"sync_account\.delay\(7, (\d+)\)", PAGE)

    assert int(task) >= int(long) >= 300
