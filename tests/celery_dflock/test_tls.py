"""``dflock_use_ssl``: the plugin talks TLS to the lock server, and says what is wrong if it cannot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from celery.exceptions import ImproperlyConfigured
from click.testing import CliRunner

from celery_dflock import LockUnavailableError, dflock
from celery_dflock.cli import dflock as command
from celery_dflock.config import settings
from tests.dflockd.client_support import make_certificate
from tests.dflockd.raw_server import ServerProcess


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(certificate: tuple[Path, Path]):
    """Wants TLS, and a certificate from its clients."""
    cert, key = map(str, certificate)
    server = ServerProcess("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", cert)
    yield server
    server.end()


def make_app(server: ServerProcess, *, use_ssl: Any) -> Celery:
    app = Celery("tls", set_as_current=False)
    app.conf.update(dflock_servers=[f"127.0.0.1:{server.port}"], dflock_use_ssl=use_ssl)
    return app


def files(certificate: tuple[Path, Path]) -> dict[str, str]:
    cert, key = map(str, certificate)
    return {"ca_certs": cert, "certfile": cert, "keyfile": key}


def test_locks_over_tls(server: ServerProcess, certificate: tuple[Path, Path]) -> None:
    app = make_app(server, use_ssl=files(certificate))
    with dflock("over-tls", app=app) as lock:
        assert lock.held
        assert lock.extend()
    assert settings(app) is settings(app)  # and so one pool, not a handshake for each lock


def test_commands_over_tls(server: ServerProcess, certificate: tuple[Path, Path]) -> None:
    app = make_app(server, use_ssl=files(certificate))
    context = CLIContext(app=app, no_color=True, workdir=None)
    done = CliRunner().invoke(command, ["status"], obj=context)
    assert done.exit_code == 0, done.output


def test_a_server_of_an_unknown_authority(server: ServerProcess) -> None:
    app = make_app(server, use_ssl=True)
    with pytest.raises(LockUnavailableError, match=r"(?i)certificate"), dflock("k", app=app):
        pass


def test_a_plain_connection_to_a_server_with_tls(server: ServerProcess) -> None:
    app = make_app(server, use_ssl=False)
    with pytest.raises(LockUnavailableError), dflock("k", app=app):
        pass


@pytest.mark.parametrize(
    ("use_ssl", "said"),
    [
        ("yes", "give True or a dict of ca_certs, certfile, keyfile"),
        ({}, "give True or a dict of ca_certs, certfile, keyfile"),
        ("", "give True or a dict of ca_certs, certfile, keyfile"),
        ({"cafile": "ca.pem"}, "give True or a dict of ca_certs, certfile, keyfile"),
        ({"ca_certs": os.devnull + "/none"}, "No such file|Not a directory"),
        ({"certfile": __file__}, "dflock_use_ssl"),
        ({"ca_certs": 3.5}, "dflock_use_ssl"),
    ],
)
def test_what_is_no_tls_setting(server: ServerProcess, use_ssl: Any, said: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=said) as caught:
        settings(make_app(server, use_ssl=use_ssl))
    assert "\n" not in str(caught.value)
