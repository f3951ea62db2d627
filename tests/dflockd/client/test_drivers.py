"""One table of scenarios for every driver: they differ in how they wait, and in nothing else."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dflockd.client.process import close_idle_connections
from tests.dflockd.client.scenario_table import TABLE, Scenario
from tests.dflockd.client.scenarios import play, play_async, wanted

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.timeout(90, method="thread")


class BlindLoop(asyncio.SelectorEventLoop):
    """An event loop that cannot wait for sockets that it has not made, as the usual one of Windows."""

    def add_reader(self, *_: Any) -> NoReturn:
        raise NotImplementedError

    add_writer = add_reader


def on_loop(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> Callable[[Scenario], list[Any]]:
    def run(scenario: Scenario) -> list[Any]:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(play_async(scenario))

    return run


def on_uvloop(scenario: Scenario) -> list[Any]:
    uvloop = pytest.importorskip("uvloop")
    return on_loop(uvloop.new_event_loop)(scenario)


DRIVERS: dict[str, Callable[[Scenario], list[Any]]] = {
    "threads": play,
    "asyncio": on_loop(asyncio.new_event_loop),
    "uvloop": on_uvloop,
    "without readers": on_loop(BlindLoop),
}


@pytest.fixture(autouse=True)
def _no_idle_connections() -> Iterator[None]:
    yield
    close_idle_connections()


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", TABLE)
def test_every_driver_comes_to_the_same(name: str, driver: str) -> None:
    assert DRIVERS[driver](TABLE[name]) == wanted(TABLE[name])


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_green_threads_come_to_the_same(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    program = [sys.executable, "-m", "tests.dflockd.client.scenarios", library]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=80, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = dict(json.loads(line) for line in done.stdout.splitlines())
    assert outcomes == {name: wanted(scenario) for name, scenario in TABLE.items()}
