"""Where it listens, its settings and its log."""

from __future__ import annotations

import logging
import os
import signal
import threading

import pytest

from dflockd.server.log import MOST_LINES, BoundedLog
from tests.dflockd.raw_server import ServerProcess, StartServer


def test_d2_documented_variables_count_and_others_do_not(start_server: StartServer) -> None:
    # D2: five variables were looked up under a wrong name, so the documented one had no effect.
    server = start_server(
        env={"DFLOCKD_MAX_LOCKS": "1", "DFLOCKD_DEFAULT_LEASE_TTL_S": "5", "MAX_LOCKS": "7"}
    )
    client = server.connect()
    assert client.ask("l", "k1", 0).endswith(" 5")
    assert client.ask("l", "k2", 0) == "error_max_locks"


def test_d24_the_log_shows_no_keys_and_no_line_for_each_request(start_server: StartServer) -> None:
    # D24: a line for each request, with the key as it came.
    quiet, busy = start_server(), start_server()
    quiet.connect().ask("ping")
    client = busy.connect()
    token = client.lock("key\x1b[31m")
    for _ in range(10):
        client.ask("l", "key\x1b[31m", 0)
    client.ask("r", "key\x1b[31m", token)
    for server in (quiet, busy):
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert len(busy.log) == len(quiet.log)
    assert "key" not in "".join(busy.log)


def test_d26_a_bad_variable_refuses_to_start(start_server: StartServer) -> None:
    # D26: it was silently ignored.
    server = start_server(env={"DFLOCKD_READ_TIMEOUT_S": "abc"})
    assert server.wait() == 2
    assert len(server.log) == 1


@pytest.mark.parametrize("host", ["a..b", "192.0.2.1"])
def test_an_address_that_cannot_be_bound(start_server: StartServer, host: str) -> None:
    server = start_server("--host", host)
    assert server.wait() == 1
    assert len([line for line in server.log if "ERROR" in line]) == 1
    assert host in server.log[-1]
    assert "Traceback" not in "".join(server.log)


def test_two_servers_on_one_port(start_server: StartServer, server: ServerProcess) -> None:
    second = start_server("--port", str(server.port))
    assert second.wait() == 1
    assert len(second.log) == 1
    assert str(server.port) in second.log[0]
    assert server.connect().ask("ping") == "ok"


def test_one_client_does_not_fill_the_log(start_server: StartServer) -> None:
    server = start_server()
    client = server.connect()
    for number in range(300):
        token = client.lock(f"k{number}")
        assert client.ask("evict", f"k{number}", int(token[:16], 16)) == "ok"
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    lines = [line for line in server.log if "evicts" in line]
    assert 1 <= len(lines) < 30, "one a second"


def test_a_log_that_nobody_reads_stops_nobody() -> None:
    reading, writing = os.pipe()
    log, more = BoundedLog(writing), 100
    record = logging.LogRecord("dflockd", logging.WARNING, __file__, 0, "x" * 100, None, None)
    # More than the pipe, the thread and the queue can take.
    for _ in range(MOST_LINES + 65_536 // 100 + more):
        log.emit(record)
    found = b""

    def read() -> None:
        nonlocal found
        while b"lines dropped" not in found and (data := os.read(reading, 65_536)):
            found += data

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while reader.is_alive():
        log.emit(record)  # the first for which there is room says how many were dropped
        reader.join(0.01)
    assert found.count(b"x" * 100) >= MOST_LINES
