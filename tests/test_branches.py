"""What a process has run is known even if it is killed."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

from dflockd import sharding
from tests import branches, saving

PATIENCE = 60.0

PROGRAM = """
import os, time
from dflockd.sharding import stable_hash_shard

if not os.fork():
    stable_hash_shard("key", 3)
time.sleep(600)
"""


def test_a_forked_child_that_is_killed_has_saved_what_it_ran(tmp_path: Path) -> None:
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("COV")},
        "COVERAGE_PROCESS_START": str(branches.ROOT / "pyproject.toml"),
        "COVERAGE_FILE": str(tmp_path / "data"),
    }
    lines, first = inspect.getsourcelines(sharding.stable_hash_shard)
    inside = set(range(first + 1, first + len(lines)))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, start_new_session=True
    )
    try:
        end = time.monotonic() + PATIENCE
        while not inside & run_lines(tmp_path):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, 9)
        process.wait(PATIENCE)
    assert inside & run_lines(tmp_path)
    for path in tmp_path.glob(f"{saving.NAMED}.*"):
        path.write_bytes(path.read_bytes() + b"cut off\t12")
    assert inside & run_lines(tmp_path)


def run_lines(directory: Path) -> set[int]:
    return {
        line
        for name, pairs in saving.saved(directory)
        for pair in pairs
        for line in pair
        if name == sharding.__file__
    }


def test_a_room_is_a_folder_of_a_package() -> None:
    assert branches.room("server/dflockd/table/slots.py") == "dflockd/table"
    assert branches.room("server/dflockd/http/page/site.py") == "dflockd/http"
    assert branches.room("celery_dflock/task.py") == "celery_dflock"
