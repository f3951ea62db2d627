"""Programs that take locks where other code was interrupted: each ends by itself, or hangs."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import forkserver
from tests.dflockd.client_support import command, stats
from tests.dflockd.raw_server import ServerProcess, eventually

ENOUGH = 50
"""Interruptions without which a program goes on for longer: on a busy machine they take their time."""

LIMIT = 60
"""Seconds after which it hangs: no wait in it is longer than 5."""


def run(
    program: str,
    server: ServerProcess,
    *args: object,
    limit: float = LIMIT,
    seconds: float = 0,
    fresh: bool = False,
) -> str:
    """Run a program to its end; return what it printed.

    Args:
        seconds: for how long it is `going_on()`.
        fresh: in a process in which nothing was imported before: its end is that of any interpreter.
    """
    text = f"seconds = {seconds}\n" + BEGINNING + program
    process = forkserver.start(
        command(text, server.port, *args, fresh=fresh),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    hangs = False
    with process.stdout, process.stderr, ThreadPoolExecutor(2) as pool:
        said = [pool.submit(file.read) for file in (process.stdout, process.stderr)]
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            hangs = True
            os.killpg(process.pid, signal.SIGKILL)  # it, and what it has forked
            process.wait()
        out, err = (each.result() for each in said)
    if hangs:
        pytest.fail(f"the program hangs:\n{out}{err}", pytrace=False)
    assert process.returncode == 0, out + err
    assert err == "", out + err
    eventually(lambda: stats(server)["connections"] == 0)
    assert stats(server)["locks"] == []
    return out


# Whoever hangs says where, a moment before the test gives up.
BEGINNING = f"""
import asyncio, atexit, faulthandler, gc, logging, os, random, signal, sys, threading, time
import types, warnings, weakref
from dflockd import client, errors, sync_client

warnings.simplefilter("ignore")
faulthandler.enable()
faulthandler.dump_traceback_later({LIMIT - 3}, exit=True)
logging.disable()
port = int(sys.argv[1])
options = {{"servers": [("127.0.0.1", port)], "acquire_timeout_s": 5}}
ends = time.monotonic() + seconds
program = os.getpid()

def lock(key, **more):
    return sync_client.DistributedLock(f"{{program}}-{{key}}", **options | more)

def going_on():
    return time.monotonic() < ends or Count.number <= {ENOUGH}

class Count:
    number = 0
"""
