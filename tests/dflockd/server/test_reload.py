"""SIGHUP: new certificates without a restart."""

from __future__ import annotations

import contextlib
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dflockd.raw_server import PATIENCE, ServerProcess, StartServer, eventually
from tests.dflockd.server.server_support import tls_flags

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
    return tls_flags(tmp_path)


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


def asked(
    server: ServerProcess,
    context: ssl.SSLContext,
    session: ssl.SSLSession | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> ssl.SSLObject:
    """Ask something over a new connection, with a session, and return the client's side of it.

    Args:
        meanwhile: done once the server has the first byte of the handshake.
    """
    sock = server.connect().sock
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    side = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1", session=session)
    with contextlib.suppress(ssl.SSLWantReadError):
        side.do_handshake()
    hello = outgoing.read()
    sock.sendall(hello[:1])
    if meanwhile is not None:
        # Handshakes are begun in order: this one is behind the other.
        assert is_served(server, context)
        meanwhile()
    sock.sendall(hello[1:])

    def until_done(step: Callable[[], object]) -> None:
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                step()
                return
            sock.sendall(outgoing.read())
            data = sock.recv(65536)
            if not data:
                raise ConnectionError("the server has ended the connection")
            incoming.write(data)

    until_done(side.do_handshake)
    side.write(b"ping\n_\n_\n")
    sock.sendall(outgoing.read())
    until_done(side.read)
    return side


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("begun", [False, True])
def test_a_session_does_not_outlive_its_authority(
    start_server: StartServer,
    tmp_path: Path,
    tls: tuple[str, ...],
    install: Install,
    certificates: Path,
    other_certificates: Path,
    version: ssl.TLSVersion,
    begun: bool,
) -> None:
    """Who resumes a session shows no certificate."""
    server = start_server(*tls, "--tls-client-ca", str(tmp_path / "ca.pem"))
    context = trusting(certificates, certificates)
    context.maximum_version = version
    session = asked(server, context).session
    assert session is not None
    # With 1.3 each would have another one follow, long after the certificate has expired.
    again = asked(server, context, session)
    assert again.session_reused == (version is ssl.TLSVersion.TLSv1_2)

    def reload() -> None:
        shutil.copy(other_certificates / "ca.pem", tmp_path)
        server.signal(signal.SIGHUP)
        server.wait_for_log("certificates reloaded")

    if not begun:
        reload()
    with pytest.raises((ssl.SSLError, ConnectionError)):
        asked(server, context, session, reload if begun else None)
    assert is_served(server, trusting(certificates, other_certificates))
    assert "Traceback" not in "".join(server.log)


def test_without_tls_nothing_happens(start_server: StartServer) -> None:
    server = start_server()
    client = server.connect()
    client.lock("k")
    server.signal(signal.SIGHUP)
    server.wait_for_log("SIGHUP: nothing to reload")
    assert client.ask("l", "k", 0) == "timeout"


HUNG_UP = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == moment:
            os.kill(os.getpid(), signal.SIGHUP)

moment = sys.argv.pop(1)
sys.meta_path.insert(0, Finder())
runpy.run_module("dflockd", run_name="__main__", alter_sys=True)
"""
"""A server that gets a SIGHUP when it is about to import a module."""


@pytest.mark.parametrize("moment", ["dflockd.cli", "uvloop"])
def test_a_wish_during_the_start_is_carried_out_by_the_server(moment: str) -> None:
    flags = ["--host", "127.0.0.1", "--port", "0"]
    command = [sys.executable, "-c", HUNG_UP, moment, *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            log = iter(process.stderr.readline, "")
            assert any("SIGHUP: nothing to reload" in line for line in log)
        finally:
            process.terminate()
        assert process.wait(PATIENCE) == 0


def test_a_server_without_a_log_serves(tmp_path: Path) -> None:
    """As a daemon it may be started with no standard error."""
    path = tmp_path / "socket"
    flags = ["--host", "127.0.0.1", "--port", "0", "--unix-socket", str(path)]
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "dflockd", *flags]
    with subprocess.Popen(command) as process:
        try:
            eventually(path.exists)
        finally:
            process.terminate()
        assert process.wait(PATIENCE) == 0


def test_a_wish_during_the_stop_changes_nothing(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--state-dir", str(tmp_path / "state"))
    server.connect().lock("k")
    server.signal(signal.SIGTERM)
    while server.process.poll() is None:
        server.signal(signal.SIGHUP)
    assert server.wait() == 0
    server.wait_for_log("stopped")


def test_a_burst_of_wishes_holds_up_nobody(
    start_server: StartServer, tls: tuple[str, ...], install: Install, certificates: Path
) -> None:
    server = start_server(*tls)
    client = server.connect(context=trusting(certificates))
    token = client.lock("k", "0 2")
    for number in range(1000):
        server.signal(signal.SIGHUP)
        if number % 10 == 0:
            assert client.ask("n", "k", token).startswith("ok ")
        if number % 100 == 0:
            assert is_served(server, trusting(certificates))
    assert client.ask("r", "k", token) == "ok"
    server.wait_for_log("certificates reloaded")
