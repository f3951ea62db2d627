"""A table of what servers do to a client, call by call, that every driver goes through.

Run as a program, with the name of a library of green threads, it patches the standard library first,
goes through the table with the blocking client, and prints what came of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Awaitable
from typing import Any

if __name__ == "__main__":
    if sys.argv[1] == "gevent":
        from gevent import monkey

        monkey.patch_all()
    else:
        import warnings

        warnings.simplefilter("ignore")  # it says that it is old
        import eventlet

        eventlet.monkey_patch()

from dflockd import client, errors, sync_client
from tests.dflockd.client.scenario_table import PATIENCE, TABLE, Scenario
from tests.dflockd.scripted_server import ScriptedCluster, ScriptedServer


class _Play:
    """One scenario under way."""

    def __init__(self, scenario: Scenario, face: Any) -> None:
        self.scenario = scenario
        servers = self.servers = ScriptedCluster() if scenario.is_cluster else ScriptedServer()
        self.first = servers.servers[0] if isinstance(servers, ScriptedCluster) else servers
        where = servers.seeds if isinstance(servers, ScriptedCluster) else [str(servers)]
        self._told = threading.Event()
        self.losses = 0
        scenario.script(servers)
        self.lock = face.DistributedLock(
            "k", servers=where, on_lost=self._lost, **{"acquire_timeout_s": 5, **scenario.options}
        )

    def _lost(self, _: object) -> None:
        self.losses += 1
        self._told.set()

    def aside(self, word: str, *about: Any) -> Any:
        """Do or say what is no method."""
        if word == "cut":
            self.first.cut()
        elif word == "asked":
            self.first.wait_asked(*about)
        elif word == "connections":
            return self.first.accepted
        elif word == "at":
            assert isinstance(self.servers, ScriptedCluster)
            return self.lock.server == str(self.servers.servers[about[0]])
        elif word == "losses":
            return self.losses
        else:
            return getattr(self.lock, word)
        return None

    def has_come(self, word: str, *about: Any) -> bool:
        return self._told.is_set() if word == "comes to be told" else self.lock.state == about[0]


def _seen(outcome: object) -> object:
    return type(outcome).__name__ if isinstance(outcome, BaseException) else outcome


def play(scenario: Scenario) -> list[Any]:
    """Go through a scenario with the blocking client; return what came of each call."""
    stage, outcomes = _Play(scenario, sync_client), []
    try:
        for (word, *about), _ in scenario.calls:
            try:
                outcome = _call(stage, word, about)
            except errors.DflockdError as exc:
                outcome = exc
            outcomes.append(_seen(outcome))
    finally:
        stage.lock.release()
        stage.servers.stop()
    return outcomes


def _call(stage: _Play, word: str, about: list[Any]) -> Any:
    if word.startswith("comes"):
        end = time.monotonic() + PATIENCE
        while not stage.has_come(word, *about):
            assert time.monotonic() < end, f"{word} {about}: it is {stage.lock.state}"
            time.sleep(0.005)
        return None
    if word == "with":
        with stage.lock as lock:
            return lock.state
    if callable(getattr(stage.lock, word, None)):
        return getattr(stage.lock, word)(*about)
    return stage.aside(word, *about)


async def play_async(scenario: Scenario) -> list[Any]:
    """Go through a scenario with the asyncio client; return what came of each call."""
    stage, outcomes = _Play(scenario, client), []
    try:
        for (word, *about), _ in scenario.calls:
            try:
                outcome = await _call_async(stage, word, about)
            except errors.DflockdError as exc:
                outcome = exc
            outcomes.append(_seen(outcome))
            # What was called for this loop from other threads.
            await asyncio.sleep(0)
    finally:
        await stage.lock.release()
        await asyncio.get_running_loop().run_in_executor(None, stage.servers.stop)
    return outcomes


async def _call_async(stage: _Play, word: str, about: list[Any]) -> Any:
    if word.startswith("comes"):
        end = time.monotonic() + PATIENCE
        while not stage.has_come(word, *about):
            assert time.monotonic() < end, f"{word} {about}: it is {stage.lock.state}"
            await asyncio.sleep(0.005)
        return None
    if word == "with":
        async with stage.lock as lock:
            return lock.state
    method = getattr(stage.lock, word, None)
    if not callable(method):
        return await asyncio.to_thread(stage.aside, word, *about)
    result = method(*about)
    return await result if isinstance(result, Awaitable) else result


def wanted(scenario: Scenario) -> list[Any]:
    """Return what must come of each call."""
    return [each.__name__ if isinstance(each, type) else each for _, each in scenario.calls]


if __name__ == "__main__":
    for name, scenario in TABLE.items():
        print(json.dumps([name, play(scenario)]), flush=True)
