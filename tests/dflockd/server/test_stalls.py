"""A server that was stopped, and what it finds when it goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from tests.dflockd.raw_server import ServerProcess, granted
from tests.dflockd.server.server_support import takes_seconds

STOPPED = 2.0
"""Seconds for which a server is stopped: it has to notice that it was."""


def stopped(server: ServerProcess, meanwhile: Callable[[], None]) -> None:
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        meanwhile()
        time.sleep(STOPPED)  # not for something to happen: so long it stands still
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@takes_seconds
def test_who_has_left_meanwhile_gets_no_lock(server: ServerProcess) -> None:
    """Or a second attempt would hear that the first, of which nobody knows any more, has it."""
    asked = {"old-l": "l", "old-e": "e", "new-l": "l", "new-e": "e"}
    arguments = {"l": "0 30", "e": "30"}
    known = {key: [server.connect() for _ in range(7)] for key in asked if key.startswith("old")}
    for attempts in known.values():
        for used in attempts[::2]:
            assert used.ask("ping", "_", "_") == "ok"
    last = {}

    def give_up_and_try_again() -> None:
        for key, command in asked.items():
            *attempts, last[key] = known.get(key) or [server.connect() for _ in range(7)]
            for attempt in attempts:
                attempt.request(command, key, arguments[command])
                attempt.sock.close()
            last[key].request("l", key, arguments["l"])

    stopped(server, give_up_and_try_again)
    for key in asked:
        assert granted(last[key].line())


@takes_seconds
def test_who_is_still_there_is_served_as_ever(server: ServerProcess) -> None:
    holder, waiter = server.connect(), server.connect()
    token = holder.lock("there", "0 30")

    def ask() -> None:
        holder.request("r", "there", token)
        holder.sock.shutdown(1)  # it says farewell, and its release counts all the same
        waiter.request("l", "there", "5 30")

    stopped(server, ask)
    assert granted(waiter.line())
