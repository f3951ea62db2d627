"""SIGHUP: new certificates without a restart."""

from __future__ import annotations

import shutil
import signal
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dflockd.raw_server import ServerProcess, StartServer

Install = Callable[[Path], None]


@pytest.fixture
def install(tmp_path: Path, certificates: Path) -> Install:
    """Put the certificates of a directory where the server has its own."""

    def install(source: Path) -> None:
        for name in ("ca.pem", "server.pem", "server.key"):
            shutil.copy(source / name, tmp_path / name)

    install(certificates)
    return install


@pytest.fixture
def tls(tmp_path: Path) -> tuple[str, ...]:
    return (
        "--tls-cert", str(tmp_path / "server.pem"),
        "--tls-key", str(tmp_path / "server.key"),
    )  # fmt: skip


def trusting(authority: Path, client: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority / "ca.pem"))
    if client is not None:
        context.load_cert_chain(client / "client.pem", client / "client.key")
    return context


def is_served(server: ServerProcess, context: ssl.SSLContext) -> bool:
    try:
        return server.connect(context=context).ask("ping") == "ok"
    except (ssl.SSLError, ConnectionError):
        return False


def test_new_connections_get_the_new_certificate(
    start_server: StartServer,
    tls: tuple[str, ...],
    install: Install,
    certificates: Path,
    other_certificates: Path,
) -> None:
    server = start_server(*tls)
    old = server.connect(context=trusting(certificates))
    old.lock("k")
    install(other_certificates)
    server.signal(signal.SIGHUP)
    server.wait_for_log("certificates reloaded")
    assert is_served(server, trusting(other_certificates))
    assert not is_served(server, trusting(certificates))
    assert old.ask("l", "k", 0) == "timeout"


@pytest.mark.parametrize("broken", ["server.pem", "server.key", "missing", "of another key"])
def test_broken_certificates_change_nothing(
    start_server: StartServer,
    tmp_path: Path,
    tls: tuple[str, ...],
    install: Install,
    certificates: Path,
    other_certificates: Path,
    broken: str,
) -> None:
    server = start_server(*tls)
    assert is_served(server, trusting(certificates))
    if broken == "missing":
        (tmp_path / "server.key").unlink()
    elif broken == "of another key":
        shutil.copy(other_certificates / "server.pem", tmp_path / "server.pem")
    else:
        (tmp_path / broken).write_text("nonsense")
    server.signal(signal.SIGHUP)
    assert "do not load" in server.wait_for_log("the certificates stay as they were: ")
    assert is_served(server, trusting(certificates))
    # It can be put right.
    install(other_certificates)
    server.signal(signal.SIGHUP)
    server.wait_for_log("certificates reloaded")
    assert is_served(server, trusting(other_certificates))


def test_an_authority_that_was_replaced_is_trusted_no_more(
    start_server: StartServer,
    tmp_path: Path,
    tls: tuple[str, ...],
    install: Install,
    certificates: Path,
    other_certificates: Path,
) -> None:
    server = start_server(*tls, "--tls-client-ca", str(tmp_path / "ca.pem"))
    assert is_served(server, trusting(certificates, certificates))
    assert not is_served(server, trusting(certificates, other_certificates))
    install(other_certificates)
    server.signal(signal.SIGHUP)
    server.wait_for_log("certificates reloaded")
    assert is_served(server, trusting(other_certificates, other_certificates))
    assert not is_served(server, trusting(other_certificates, certificates))
    assert not is_served(server, trusting(other_certificates))


def test_without_tls_nothing_happens(start_server: StartServer) -> None:
    server = start_server()
    client = server.connect()
    client.lock("k")
    server.signal(signal.SIGHUP)
    server.wait_for_log("SIGHUP: no TLS, nothing to reload")
    assert client.ask("l", "k", 0) == "timeout"
