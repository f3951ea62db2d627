"""The examples, each run as its first lines say: real Redis, real servers, real workers."""

import os
import re
import subprocess
import sys

import pytest

from examples.demo import stage

BOUND = 60


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def lock_server(directory):
    with stage.LockServer(directory) as server:
        yield server


@pytest.fixture(scope="module")
def env(needs_redis, directory, lock_server):
    with stage.Redis(directory) as redis:
        yield {"BROKER_URL": redis.url, "DFLOCK_SERVERS": lock_server.address}


def run(name, env):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"examples.{name}"],
        env={**os.environ, **env},
        cwd=stage.ROOT,
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_locked_task_takes_turns(directory, env):
    with stage.Worker(directory, app="examples.locked_task", env=env, concurrency=4) as worker:
        worker.wait_ready()
        lines = run("locked_task", env)

    ends = {}
    for line in lines:
        account, began, ended = re.match(r"account (\d): ([\d.]+) to ([\d.]+) s", line).groups()
        assert float(began) >= ends.get(account, 0.0) - 0.005  # the figures are rounded
        ends[account] = float(ended)
    assert len(lines) == 5


def test_skip_skips_the_second(directory, env):
    with stage.Worker(directory, app="examples.skip", env=env, concurrency=2) as worker:
        worker.wait_ready()
        lines = run("skip", env)

    assert sorted(lines) == ["done", "skipped: report was locked"]


def test_outside_a_task(lock_server):
    lines = run("outside_a_task", {"DFLOCK_SERVERS": lock_server.address})

    assert re.fullmatch(r"holding account:7, fence \d+", lines[0])
    held_by = r"outside_a_task.py \S+ pid \d+, for \d+ s"
    assert re.fullmatch(f"lock 'account:7' was not acquired: it is held by {held_by}", lines[1])
    assert len(lines) == 2


def test_two_servers(directory, lock_server):
    with stage.LockServer(directory, name="second") as second:
        servers = f"{lock_server.address},{second.address}"
        lines = run("two_servers", {"DFLOCK_SERVERS": servers})

    where = [line.split(", ")[1] for line in lines]
    assert set(where) == {lock_server.address, second.address}
