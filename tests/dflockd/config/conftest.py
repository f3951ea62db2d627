"""Files that settings name."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a certificate, its key, the key encrypted, and a secret."""
    where = tmp_path_factory.mktemp("config")
    (where / "secret").write_text("open sesame\n")
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not on PATH")
    for command in (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=x"
        " -keyout key -out cert",
        "ec -in key -aes128 -passout pass:secret -out locked-key",
    ):
        subprocess.run([openssl, *command.split()], cwd=where, check=True, capture_output=True)
    return where
