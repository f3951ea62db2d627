"""The image of the lock server, as containers are run."""

import json
import subprocess
import time
import uuid
from contextlib import contextmanager

import pytest

from tests.smoke import engine
from tests.smoke.engine import docker

pytestmark = pytest.mark.smoke

BOUND = 60
HARDENED = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges:true"]
GRANT = """
from dflockd.sync_client import DistributedLock
with DistributedLock("image") as lock: print("fence", lock.fence)
"""
HOLD = """
from dflockd.sync_client import DistributedLock
with DistributedLock("image"): print("held", flush=True); input()
"""
SECRET = "four score and seven"


@contextmanager
def running(*flags):
    name = f"smoke-{uuid.uuid4().hex[:12]}"
    docker("run", "--detach", "--name", name, *HARDENED, *flags, engine.SERVER)
    try:
        yield name
    finally:
        docker("rm", "--force", "--volumes", name)


def state(name):
    return json.loads(docker("inspect", "--format", "{{json .State}}", name))


def log(name):
    done = subprocess.run(["docker", "logs", name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def wait_until(probe, name):
    ends = time.monotonic() + BOUND
    while not probe():
        assert time.monotonic() < ends, log(name)
        time.sleep(0.1)


def wait_for_log(name, text):
    wait_until(lambda: text in log(name), name)


def grant(name):
    wait_for_log(name, "listening on")
    return docker("exec", name, "python3", "-c", GRANT)


@pytest.mark.parametrize("user", [[], ["--user=12345:0"], ["--user=54321:54321"]])
def test_any_user_will_do(user):
    with running(*user) as name:
        assert grant(name).startswith("fence ")


@pytest.mark.parametrize("uid", [65532, 12345])
def test_a_killed_container_goes_on_with_its_state(uid):
    # A new volume belongs to the user of the image; another user brings a directory of its own.
    state_dir = "/var/lib/dflockd" if uid == 65532 else "/state/dflockd"
    volume = f"smoke-{uuid.uuid4().hex[:12]}"
    docker("volume", "create", volume)
    try:
        if uid != 65532:
            make = f"import os; os.mkdir('{state_dir}'); os.chown('{state_dir}', {uid}, {uid})"
            docker(
                *("run", "--rm", "--user=0", f"--volume={volume}:/state", "--entrypoint=python3"),
                *(engine.SERVER, "-c", make),
            )
        mount = state_dir if uid == 65532 else "/state"
        flags = [f"--user={uid}:{uid}", f"--volume={volume}:{mount}"]
        with running(*flags, f"--env=DFLOCKD_STATE_DIR={state_dir}") as name:
            first = int(grant(name).split()[1])
            docker("kill", "--signal=KILL", name)
            docker("start", name)
            wait_until(lambda: log(name).count("listening on") == 2, name)
            assert int(grant(name).split()[1]) > first
    finally:
        docker("volume", "rm", "--force", volume)


def test_sigterm_drains():
    with running() as name:
        wait_for_log(name, "listening on")
        words = ["docker", "exec", "-i", name, "python3", "-c", HOLD]
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holder:
            assert holder.stdout.readline() == "held\n"
            docker("kill", "--signal=TERM", name)
            wait_for_log(name, "draining")
            assert state(name)["Running"]  # it waits for its holder
            holder.communicate("\n", timeout=BOUND)
        wait_until(lambda: not state(name)["Running"], name)

        assert state(name)["ExitCode"] == 0
        assert "stopped" in log(name)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"DFLOCKD_PORT": "7000"},
        {"DFLOCKD_HOST": "127.0.0.1"},
        {"DFLOCKD_AUTH_TOKEN": SECRET},
        {"DFLOCKD_UNIX_SOCKET": "/run/dflockd/dflockd.sock"},
    ],
    ids=lambda env: next(iter(env), "plain"),
)
def test_the_health_check_asks_where_the_server_is(env):
    flags = [f"--env={name}={value}" for name, value in env.items()]
    with running(*flags, "--tmpfs=/run/dflockd:uid=65532") as name:
        wait_for_log(name, "listening on")
        docker("exec", name, "dflockd-healthcheck")
        assert "wrong or missing" not in log(name)


def test_a_sidecar_on_a_socket():
    volume = f"smoke-{uuid.uuid4().hex[:12]}"
    where = f"--volume={volume}:/run/dflockd"
    socket = "/run/dflockd/dflockd.sock"
    grant_there = GRANT.replace('"image"', f'"image", servers=["unix:{socket}"]')
    try:
        with running(where, f"--env=DFLOCKD_UNIX_SOCKET={socket}", "--network=none") as name:
            wait_for_log(name, "listening on unix:")
            worker = ["run", "--rm", where, "--network=none", *HARDENED, engine.WORKER]
            assert docker(*worker, "python", "-c", grant_there).startswith("fence ")
            docker("kill", "--signal=KILL", name)  # leaves its socket behind
            docker("start", name)
            wait_until(lambda: log(name).count("listening on unix:") == 2, name)
            assert docker(*worker, "python", "-c", grant_there).startswith("fence ")
    finally:
        docker("volume", "rm", "--force", volume)


def test_docker_finds_it_healthy():
    with running("--health-interval=1s") as name:
        wait_until(lambda: state(name)["Health"]["Status"] == "healthy", name)


def test_the_health_check_notices_a_server_that_hangs():
    with running() as name:
        wait_for_log(name, "listening on")
        # PID 1 of a container cannot be stopped from within.
        pid = state(name)["Pid"]
        stop = ["run", "--rm", "--pid=host", "--user=0", "--entrypoint=python3", engine.SERVER]
        docker(*stop, "-c", f"import os, signal; os.kill({pid}, signal.SIGSTOP)")
        check = subprocess.run(
            ["docker", "exec", name, "dflockd-healthcheck"],
            capture_output=True,
            text=True,
            check=False,
            timeout=BOUND,
        )
        docker(*stop, "-c", f"import os, signal; os.kill({pid}, signal.SIGCONT)")

        assert check.returncode == 1
        assert "does not answer" in check.stderr
