"""The server as its clients see it: real processes, raw sockets, on uvloop and on plain asyncio.

D1 to D28 are defects of the first dflockd server; each test says what the defect was.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.dflockd.raw_server import RawClient, ServerProcess


@pytest.fixture
def alice(server: ServerProcess) -> RawClient:
    return server.connect()


@pytest.fixture
def bob(server: ServerProcess) -> RawClient:
    return server.connect()


def make_certificates(where: Path) -> Path:
    """Make an authority in `where`, and a server and a client certificate signed by it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not on PATH")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=where, check=True, capture_output=True)

    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    new += ["-days", "1"]
    run(
        *new, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign",
    )  # fmt: skip
    for name in ("server", "client"):
        run(
            *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem",
            "-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1",
            "-addext", "basicConstraints=critical,CA:FALSE",
        )  # fmt: skip
    return where


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an authority, and a server and a client certificate signed by it."""
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other_certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of another authority."""
    return make_certificates(tmp_path_factory.mktemp("tls"))
