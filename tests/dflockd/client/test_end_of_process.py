"""A program does not end before the client's thread sleeps: Python can crash.

https://github.com/python/cpython/issues/84058
"""

from __future__ import annotations

import pytest

from tests.dflockd.client_support import run_strictly
from tests.dflockd.raw_server import ServerProcess

# What is registered first is called last.
PROGRAM = """
import _thread, atexit, sys, time

def last():
    others = [frame for number, frame in sys._current_frames().items() if number != _thread.get_ident()]
    print([frame.f_code.co_name for frame in others])
    LAST

atexit.register(last)
from dflockd.sync_client import DistributedLock

begin = _thread.start_new_thread

def begin_late(function, args):
    def run():
        time.sleep(0.2)
        function(*args)
    return begin(run, ())

_thread.start_new_thread = begin_late
lock = DistributedLock("my-key", servers=[("127.0.0.1", int(sys.argv[1]))], lease_ttl_s=1)
"""

USED = {
    "not at all": ("", []),
    "a moment": ("with lock: pass", ["select"]),
    "often": ("for _ in range(20):\n    with lock: pass", ["select"]),
    "and held still": ("lock.acquire()", ["select"]),
    "and forgotten": ("lock.acquire()\ndel lock", ["select"]),
}


def run(program: str, server: ServerProcess) -> list[str]:
    """Run it; return the lines that it prints."""
    result = run_strictly(program, server.port)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


@pytest.mark.parametrize(("use", "threads"), USED.values(), ids=USED)
def test_no_thread_is_about_to_begin(server: ServerProcess, use: str, threads: list[str]) -> None:
    assert run(PROGRAM.replace("LAST", "") + use, server) == [str(threads)]


def test_a_lock_that_is_held_is_renewed_until_the_end(server: ServerProcess) -> None:
    at_last = "time.sleep(1.5); print(lock.held)"
    assert run(PROGRAM.replace("LAST", at_last) + "lock.acquire()", server)[1:] == ["True"]


def test_locks_can_be_had_and_are_renewed_until_the_end(server: ServerProcess) -> None:
    at_last = """
    with lock:
        time.sleep(1.5)
        print(lock.held)
    """
    assert run(PROGRAM.replace("LAST", at_last) + "with lock: pass", server)[1:] == ["True"]
