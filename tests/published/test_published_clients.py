"""The published clients, unmodified, against this server.

They need Python 3.12 or 3.13 and are installed from PyPI into environments of their own; where
there is no such interpreter, or no PyPI, the tests are skipped.
"""

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from examples.demo import stage
from tests.environments import NotToBeHadError, environment

pytestmark = pytest.mark.timeout(500)

BOUND = 200
"""Seconds for what a process does here. The first time a package is installed."""

HERE = Path(__file__).parent

OLD = ["lock", "fifo", "renewal", "sharding"]
SINCE_1 = [*OLD, "two_phase", "semaphore", "stats"]
PUBLISHED = {
    "dflockd==0.4.1": OLD,
    "dflockd==0.5.0": [*OLD, "two_phase"],
    "dflockd-client==1.9.0": SINCE_1,
    "dflockd-client==2.1.1": [*SINCE_1, "fences"],
}


def interpreters():
    for name in ("python3.13", "python3.12"):
        if found := shutil.which(name):
            yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for minor in (13, 12):
        yield from sorted(map(str, pyenv.glob(f"versions/3.{minor}*/bin/python")))


@functools.cache
def python_with(package):
    """The Python of an environment that has the package."""
    for path in interpreters():
        check = [path, "-c", "import sys, venv; sys.exit(sys.version_info < (3, 12))"]
        if subprocess.run(check, capture_output=True, timeout=BOUND, check=False).returncode == 0:
            try:
                return environment(package.replace("==", "-"), [package], path, bound=BOUND)
            except NotToBeHadError as error:
                pytest.skip(str(error))
    pytest.skip("what is published needs Python 3.12 or 3.13: none found")


def play(python, scenarios, **config):
    run = subprocess.run(
        [python, str(HERE / "scenarios.py"), json.dumps(config), *scenarios],
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == f"passed: {len(scenarios)}"


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("servers")
    with stage.LockServer(directory) as one, stage.LockServer(directory, name="two") as two:
        yield [(server.host, server.port) for server in (one, two)]


@pytest.mark.parametrize("package", PUBLISHED)
def test_published_client(package, servers):
    play(python_with(package), PUBLISHED[package], servers=servers)


@pytest.mark.parametrize("package", ["dflockd-client==1.9.0", "dflockd-client==2.1.1"])
def test_published_client_with_auth(package, tmp_path):
    python = python_with(package)
    secret = tmp_path / "secret"
    secret.write_text("right\n")
    with stage.LockServer(tmp_path, "--auth-token-file", str(secret)) as server:
        play(python, ["auth"], servers=[(server.host, server.port)])


@pytest.mark.parametrize("package", ["dflockd-client==1.9.0", "dflockd-client==2.1.1"])
def test_published_client_over_tls(package, tmp_path, certificate):
    python = python_with(package)
    cert, key = certificate
    with stage.LockServer(tmp_path, "--tls-cert", cert, "--tls-key", key) as server:
        play(python, ["tls"], servers=[(server.host, server.port)], cafile=cert)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    place = tmp_path_factory.mktemp("certificate")
    cert, key = str(place / "cert.pem"), str(place / "key.pem")
    command = [
        *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-keyout", key, "-out", cert),
        *("-addext", "subjectAltName=IP:127.0.0.1"),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=BOUND)
    return cert, key
