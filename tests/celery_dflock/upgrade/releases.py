"""The first release of both distributions, as wheels built from its commit, beside the code here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from celery.utils.nodenames import gethostname

from dflockd.sync_client import DistributedLock
from examples.demo.stage import ROOT, LockServer, Worker, wait_until
from tests import forkserver
from tests.celery_dflock import mixed
from tests.celery_dflock.processes import Waiter, waiters

FIRST = "50a09f1"
"""What 0.1 was built from."""
BUILD_BOUND = 110
PATIENCE = 60.0
PLACE = ROOT / ".venv" / "releases" / f"{FIRST}-py{sys.version_info[0]}{sys.version_info[1]}"


class Release(NamedTuple):
    """Where processes import both packages from."""

    name: str
    path: tuple[Path, ...]

    @property
    def env(self) -> dict[str, str]:
        # Without PYTHONSAFEPATH `python -m` puts the working directory first: the code here.
        path = dict.fromkeys(map(str, (*self.path, ROOT)))
        return {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def here() -> Release:
    return Release("new", (ROOT, ROOT / "server"))


def first() -> Release:
    """The first release; built once. Skips where that is not possible."""
    if not PLACE.exists():
        with tempfile.TemporaryDirectory() as directory:
            built = Path(directory)
            _unpack(FIRST, built / "source")
            _install(built / "target", built / "source", built / "source" / "server")
            PLACE.parent.mkdir(exist_ok=True)
            shutil.rmtree(PLACE, ignore_errors=True)
            shutil.move(built / "target", PLACE)
    return Release("old", (PLACE,))


def _unpack(commit: str, target: Path) -> None:
    archive = ["git", "-C", str(ROOT), "archive", commit]
    try:
        run = subprocess.run(archive, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"release 0.1 cannot be built: this checkout has no commit {commit}")
    with tarfile.open(fileobj=BytesIO(run.stdout)) as files:
        files.extractall(target, filter="data")


def _install(target: Path, *sources: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    install = [*pip, "--no-deps", "--retries", "1", "--target", str(target), *map(str, sources)]
    try:
        run = subprocess.run(
            install, capture_output=True, text=True, timeout=BUILD_BOUND, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip("release 0.1 cannot be built: it took too long")
    if run.returncode:
        why = (run.stderr.strip().splitlines() or ["?"])[-1]
        pytest.skip(f"release 0.1 cannot be built: {why}")


def evaluate(release: Release, code: str, asked: Any) -> Any:
    """What the function `answer` of this code makes of each of the values, in a process of its own."""
    program = (
        f"import json, sys\n{code}\nprint(json.dumps([answer(*a) for a in json.load(sys.stdin)]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **release.env},
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


# Processes of a release.


class Server(LockServer):
    def __init__(
        self, directory: Path, release: Release, *args: str, name: str = "dflockd"
    ) -> None:
        super().__init__(directory, *args, name=name)
        self._env.update(release.env)

    def replace(self, release: Release) -> None:
        """Have a server of another release in its place, at the same address."""
        self.kill()
        self._env.update(release.env)
        self.start()


def worker(directory: Path, release: Release, queues: str, **options: Any) -> Worker:
    """A worker for `rolled`, not yet started."""
    env = {**options.pop("env"), **release.env}
    name = f"{release.name}-{queues.replace(',', '-')}"
    app = "tests.celery_dflock.upgrade.rolled"
    return Worker(directory, *("-Q", queues), app=app, name=name, env=env, **options)


class Sender:
    """A process that sends tasks; see `rolled`."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.modules: list[str] = self._answer()

    def send(self, task: str, *each: dict[str, Any], **options: Any) -> str:
        """Return the task id. With the arguments of several it is the id of their chord."""
        asked = {"task": f"rolled.{task}", "each": each, **options}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return str(self._answer())

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        assert line, "the sender has ended"
        return json.loads(line)


@contextmanager
def sender(release: Release, env: dict[str, str]) -> Iterator[Sender]:
    process = forkserver.start(
        [sys.executable, "-m", "tests.celery_dflock.upgrade.rolled"],
        cwd=ROOT,
        env={**os.environ, **env, **release.env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process.stdout:
        started = Sender(process)
        for module in started.modules:
            assert any(Path(module).is_relative_to(path) for path in release.path), module
        with process.stdin:
            yield started
    process.wait(PATIENCE)


class Stage:
    """The lock server, and what the workers and senders of both releases do at it."""

    def __init__(self, directory: Path, broker: str, server: Server, running: ExitStack) -> None:
        self.directory = directory
        self.server = server
        self.record = directory / "record.jsonl"
        self.name = directory.name
        self._running = running
        self._processes: list[Worker] = []
        self.env = {
            mixed.BROKER: broker,
            mixed.RECORD: str(self.record),
            "DFLOCK_SERVERS": server.address,
        }
        mixed.configure(broker)

    def queue(self, name: str) -> str:
        return f"{self.name}-{name}"

    def worker(self, release: Release, *queues: str, concurrency: int = 2) -> Worker:
        names = ",".join(map(self.queue, queues))
        options = {"concurrency": concurrency, "env": self.env}
        started = worker(self.directory, release, names, **options)
        self._processes.append(started)
        return self._running.enter_context(started)

    def sender(self, release: Release) -> Sender:
        return self._running.enter_context(sender(release, self.env))

    def held(self, *keys: str) -> ExitStack:
        """Hold the locks in this process, for as long as the block lasts."""
        locks = ExitStack()
        for key in keys:
            lock = DistributedLock(key, 0, 30, [self.server.address])
            assert lock.acquire(), key
            locks.callback(lock.release)
        return locks

    def waiter(self, key: str) -> Waiter:
        """Wait for a lock in this process, behind those who wait already."""
        lock = DistributedLock(key, None, 30, [self.server.address])
        return self._running.enter_context(Waiter(lock))

    def wait_ended(self, *task_ids: str, retries: int = 0, seconds: float = PATIENCE) -> None:
        """Wait until these runs have ended.

        Their results are no witness: where the pause is short, Celery may store the RETRY of one
        attempt after the SUCCESS of the next.
        """

        def probe() -> bool | None:
            ended = {e["id"] for e in mixed.history(self.record, "end") if e["retries"] == retries}
            return ended.issuperset(task_ids) or None

        self.wait(probe, f"the end of {task_ids}", seconds)

    def result(self, task_id: str) -> Any:
        """What a task returned."""
        state = mixed.app.AsyncResult(task_id)
        self.wait(lambda: state.ready() or None, f"the result of {task_id}")
        return state.get(timeout=1)

    def events(self, what: str, task_id: str) -> list[dict[str, Any]]:
        return [e for e in mixed.history(self.record) if e["what"] == what and e["id"] == task_id]

    def wait_events(self, what: str, *task_ids: str, number: int = 1) -> None:
        def probe() -> bool | None:
            return all(len(self.events(what, each)) >= number for each in task_ids) or None

        self.wait(probe, f"{number} x {what} of {task_ids}")

    def wait_waiters(self, key: str, number: int) -> None:
        self.wait(
            lambda: waiters(self.server, key) == number or None, f"{number} waiters for {key}"
        )

    def wait(self, probe: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
        def failure() -> str:
            logs = "\n\n".join(each.with_log(each.name) for each in self._processes)
            return f"waited {seconds:g} s for {what}\n{logs}"

        wait_until(probe, seconds, failure)

    def settle(self, worker: Worker, queue: str, number: int) -> None:
        """Let a worker receive no more, until so many that it has requeued lie in the queue.

        What it is about to run when it is asked to end, Celery itself may run and deliver again.
        """
        name, node = self.queue(queue), f"{worker.name}@{gethostname()}"
        mixed.app.control.cancel_consumer(name, destination=[node])
        with mixed.app.connection() as connection:
            size = connection.default_channel.client.llen
            self.wait(lambda: size(name) == number or None, f"{number} messages in {name}")

    def is_redelivered(self, task_id: str) -> bool:
        """Whether the broker has said so to one of its attempts."""
        events = mixed.history(self.record)
        return any(event["id"] == task_id and event["redelivered"] for event in events)

    def runs(self, task_id: str) -> int:
        return len(self.events("begin", task_id))

    def judge(self) -> None:
        """Nobody shared a key, nothing failed or ran twice, and nobody holds anything any more."""
        assert not mixed.violations(mixed.history(self.record))
        assert not mixed.history(self.record, "failed")
        for event in mixed.history(self.record):
            for key in event["holds"]:
                self.wait(lambda key=key: waiters(self.server, key) is None or None, f"{key}: free")
