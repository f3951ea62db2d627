"""Locks taken before any line of what the client does, as by a signal handler or a finaliser."""

from __future__ import annotations

import os

import pytest

from tests.dflockd.client.programs import run
from tests.dflockd.raw_server import ServerProcess

# What a signal handler or a finaliser can do between two lines, done before every line in turn.
BETWEEN = """
import dflockd

package = os.path.dirname(dflockd.__file__)
count = wanted = 0

def meanwhile():
    with lock("meanwhile") as own:
        assert own.held
    forgotten = lock("forgotten")
    assert forgotten.acquire()
    kept.append(lock("kept"))
    assert kept[0].acquire()
    assert kept.pop().release()
    assert not lock("busy", acquire_timeout_s=0).acquire()

def trace(frame, event, argument):
    global count
    if not frame.f_code.co_filename.startswith(package):
        return None
    if event == "line":
        count += 1
        if count == wanted:
            meanwhile()
    return trace

kept = []
calls = {}

def case(function):
    calls[function.__name__] = function

@case
def block():
    with lock("mine") as mine:
        assert mine.held

@case
def renewal():
    mine = lock("mine")
    assert mine.acquire() and mine.renew() and mine.release()

@case
def queue():
    mine = lock("busy")
    assert mine.enqueue() == "queued"
    assert mine.wait(0) is False

@case
def place():
    mine = lock("busy")
    assert mine.enqueue() == "queued"
    mine.release()

@case
def handover():
    mine = lock("mine")
    assert mine.acquire()
    token = mine.detach()
    assert mine.adopt(token) and mine.release()

@case
def forget():
    mine = lock("mine")
    assert mine.acquire()
    del mine

def once(number):
    global count, wanted
    count, wanted = 0, number
    faulthandler.dump_traceback_later(7, exit=True)
    sys.settrace(trace)
    try:
        calls[how]()
    finally:
        sys.settrace(None)
    return count >= number

how = sys.argv[2]
step = int(sys.argv[4])
number = random.randint(1, step)
if sys.argv[3] == "first":
    # Nothing of the client has been made in these processes.
    faulthandler.cancel_dump_traceback_later()  # its thread would not be in them
    import socket
    raw = socket.create_connection(("127.0.0.1", port), 10)
    raw.sendall(f"l\\n{program}-busy\\n0 600\\n".encode())
    assert raw.recv(100).startswith(b"ok")
    while True:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if once(number) else 9
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 9:
            break
        assert status == 0, f"at line {number}"
        number += step
    raw.close()
else:
    busy = lock("busy")
    assert busy.acquire()
    while once(number):
        number += 1
    assert busy.release()
print(number)
"""


@pytest.mark.parametrize("how", ["block", "renewal", "queue", "place", "handover", "forget"])
def test_before_any_line(server: ServerProcess, how: str) -> None:
    assert int(run(BETWEEN, server, how, "later", 1, limit=60)) > 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize(
    ("how", "step"),
    [
        ("block", 8),
        *(pytest.param(how, 1, marks=pytest.mark.soak) for how in ("block", "queue", "handover")),
    ],
)
@pytest.mark.timeout(300)
def test_before_any_line_of_the_first_use(server: ServerProcess, how: str, step: int) -> None:
    """Each line has a process of its own, so it is each eighth, another one in each run."""
    assert int(run(BETWEEN, server, how, "first", step, limit=240)) > 20
