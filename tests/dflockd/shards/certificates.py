"""Certificates of an authority that is made for a test; some of them expire in seconds."""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

_SETTINGS = """
[ca]
default_ca = here
[here]
database = {name}.index
new_certs_dir = .
default_md = sha256
policy = any
rand_serial = yes
unique_subject = no
copy_extensions = copy
[any]
commonName = supplied
"""


class Authority:
    """An authority whose files are in a directory: ``<name>.pem`` is its own certificate."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not on PATH")
        self.directory = directory
        self.name = name
        (directory / f"{name}.index").touch()
        (directory / f"{name}.cnf").write_text(_SETTINGS.format(name=name))
        files = f"-keyout {name}.key -out {name}.pem"
        # Python 3.13 takes no authority that does not say so.
        use = "-addext keyUsage=critical,keyCertSign,cRLSign"
        self._run(f"req -x509 {_NEW} -days 2 -subj /CN={name} {use} {files}")

    def sign(self, name: str, seconds: float = 3600) -> None:
        """Make ``<name>.pem`` and ``<name>.key``, for so long, in the place of others."""
        extension = "-addext subjectAltName=IP:127.0.0.1"
        self._run(f"req {_NEW} -subj /CN={name} {extension} -keyout new.key -out new.csr")
        until = datetime.now(UTC) + timedelta(seconds=seconds)
        self._run(
            f"ca -batch -notext -config {self.name}.cnf -cert {self.name}.pem "
            f"-keyfile {self.name}.key -in new.csr -out new.pem "
            f"-startdate 20200101000000Z -enddate {until:%Y%m%d%H%M%SZ}"
        )
        for kind in ("key", "pem"):
            (self.directory / f"new.{kind}").rename(self.directory / f"{name}.{kind}")

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def _run(self, command: str) -> None:
        subprocess.run(
            ["openssl", *command.split()], cwd=self.directory, check=True, capture_output=True
        )


_NEW = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
