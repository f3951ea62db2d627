"""What a type checker says to users of the clients: typos are errors, and what is right is none."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dflockd import client, sync_client
from dflockd.client.lock import Named

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[3]

RIGHT = """
import ssl
from {module} import DistributedLock, DistributedSemaphore, stable_hash_shard

def lost(lock: object) -> None:
    pass

context = ssl.create_default_context()
DistributedLock("key")
DistributedLock("key", 0.5, 33, [("a", 1), "b:2"], stable_hash_shard, 0.3)
DistributedLock("key", None, servers="cluster://a:1", auth_token="secret", ssl_context=context)
DistributedLock("key", label="nightly", owner=("run", 1), on_lost=lost)
DistributedSemaphore("key", 3)
DistributedSemaphore("key", limit=3)
DistributedSemaphore(key="key", limit=3, acquire_timeout_s=None, lease_ttl_s=None)
DistributedSemaphore("key", 3, 0.5, 33, [("a", 1), "b:2"], stable_hash_shard, 0.3)
DistributedSemaphore("key", 3, servers="cluster://a:1", auth_token="secret", ssl_context=context)
DistributedSemaphore("key", 3, label="nightly", on_lost=lost, renew_ratio=0.5)
DistributedSemaphore("key", 3, owner=("run", 0))
DistributedSemaphore("key", 3, sharding_strategy=lambda key, number: 0)
limit: int = DistributedSemaphore("key", 3).limit
"""

WRONG = """
from {module} import DistributedLock, DistributedSemaphore

DistributedSemaphore("key")
DistributedSemaphore("key", "3")
DistributedSemaphore("key", 3, acquire_timout_s=5)
DistributedSemaphore("key", 3, timeout=5)
DistributedSemaphore("key", 3, lease_ttl=33)
DistributedSemaphore("key", 3, lable="nightly")
DistributedSemaphore("key", 3, onlost=print)
DistributedSemaphore("key", 3, server=["a:1"])
DistributedSemaphore("key", 3, acquire_timeout_s="5")
DistributedSemaphore("key", 3, lease_ttl_s=0.5)
DistributedSemaphore("key", 3, servers=5)
DistributedSemaphore("key", 3, servers={{"a:1"}})
DistributedSemaphore("key", 3, sharding_strategy=5)
DistributedSemaphore("key", 3, renew_ratio="0.5")
DistributedSemaphore("key", 3, auth_token=b"secret")
DistributedSemaphore("key", 3, ssl_context=True)
DistributedSemaphore("key", 3, label=None)
DistributedSemaphore("key", 3, owner="run")
DistributedSemaphore("key", 3, on_lost=5)
DistributedSemaphore("key", 3, 10, None, ["a:1"], None, 0.5)
DistributedSemaphore("key", 3, 10, None, ["a:1"], max, 0.5, "secret")
DistributedSemaphore(b"key", 3)
DistributedLock("key", limit=3)
DistributedLock("key", acquire_timout_s=5)
DistributedLock("key", label=None)
"""

METHODS = {
    sync_client: """
from {module} import DistributedLock, DistributedSemaphore, Reservation

def right(lock: DistributedSemaphore) -> None:
    with lock as held:
        token: str | None = held.token
        fence: int | None = held.fence
        limit: int = held.limit
    granted: bool = lock.acquire() and lock.renew(5) and lock.release()
    place: str = lock.enqueue()
    waited: bool = lock.wait(0.5, Reservation(1, 2))

def wrong(lock: DistributedSemaphore) -> None:
    lock.acquire(5)  # wrong
    lock.wait("5")  # wrong
    lock.renew("5")  # wrong
    lock.evict("5")  # wrong
    lock.pause("5")  # wrong
    lock.adopt(5)  # wrong
    token: str = lock.token  # wrong
""",
    client: """
from {module} import DistributedLock, DistributedSemaphore, Reservation

async def right(lock: DistributedSemaphore) -> None:
    async with lock as held:
        token: str | None = held.token
        fence: int | None = held.fence
        limit: int = held.limit
    granted: bool = await lock.acquire() and await lock.renew(5) and await lock.release()
    place: str = await lock.enqueue()
    waited: bool = await lock.wait(0.5, Reservation(1, 2))

async def wrong(lock: DistributedSemaphore) -> None:
    await lock.acquire(5)  # wrong
    await lock.wait("5")  # wrong
    await lock.renew("5")  # wrong
    await lock.evict("5")  # wrong
    await lock.adopt(5)  # wrong
    token: str = lock.token  # wrong
    granted: bool = lock.acquire()  # wrong
""",
}

FACES = pytest.mark.parametrize("module", [sync_client, client], ids=["sync", "asyncio"])


class Checked:
    """Snippets, and the lines of each that mypy finds wrong."""

    def __init__(self, directory: Path) -> None:
        self.lines: dict[str, list[str]] = {}
        for module in (sync_client, client):
            snippets = {"right": RIGHT, "wrong": WRONG, "methods": METHODS[module]}
            for name, text in snippets.items():
                path = directory / f"{name}_{module.__name__.replace('.', '_')}.py"
                path.write_text(text.format(module=module.__name__).lstrip())
                self.lines[path.name] = path.read_text().splitlines()
        # As users check their own programs: with what the package says of itself, nothing of ours.
        command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]
        run = subprocess.run(
            [*command, "--cache-dir", str(directory / "cache"), *sorted(self.lines)],
            cwd=directory,
            env={**os.environ, "MYPYPATH": str(ROOT / "server")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert run.returncode in (0, 1), run.stdout + run.stderr
        self.output = run.stdout
        self.errors = {
            (found[1], int(found[2]))
            for found in re.finditer(r"^([\w.]+):(\d+): error: ", run.stdout, re.M)
        }

    def wrong(self, name: str, module: ModuleType) -> list[str]:
        file = f"{name}_{module.__name__.replace('.', '_')}.py"
        lines = self.lines[file]
        return [line for number, line in enumerate(lines, 1) if (file, number) in self.errors]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    pytest.importorskip("mypy")
    return Checked(tmp_path_factory.mktemp("typing"))


@FACES
def test_what_is_right(checked: Checked, module: ModuleType) -> None:
    assert checked.wrong("right", module) == [], checked.output


@FACES
def test_typos_and_wrong_types(checked: Checked, module: ModuleType) -> None:
    lines = [line for line in WRONG.splitlines() if line.startswith("Distributed")]
    expected = [line.format() for line in lines]
    assert checked.wrong("wrong", module) == expected, checked.output


@FACES
def test_methods(checked: Checked, module: ModuleType) -> None:
    expected = [line for line in METHODS[module].splitlines() if line.endswith("# wrong")]
    assert checked.wrong("methods", module) == expected, checked.output


@FACES
def test_the_arguments_can_be_looked_up(module: ModuleType) -> None:
    """An editor shows them, and `help` does."""
    lock = dict(inspect.signature(module.DistributedLock).parameters)
    semaphore = dict(inspect.signature(module.DistributedSemaphore).parameters)
    assert list(semaphore)[:2] == ["key", "limit"]
    del semaphore["limit"], semaphore["weight"]  # of several holders alone
    assert semaphore == lock
    by_name = [name for name, each in lock.items() if each.kind is each.KEYWORD_ONLY]
    assert sorted([*Named.__annotations__, "rate"]) == sorted(by_name)
    assert not any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in lock.values())
