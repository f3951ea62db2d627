"""Who may come in: TLS and client certificates."""

from __future__ import annotations

import signal
import ssl
import subprocess
from pathlib import Path

import pytest

from dflockd import clock
from dflockd.address import Address
from dflockd.client.blocking import drive
from dflockd.client.connection import Route, dial, reason
from dflockd.errors import UnreachableError
from dflockd.files import not_after
from tests.dflockd.client_support import face_named
from tests.dflockd.raw_server import PATIENCE, StartServer, eventually, granted
from tests.dflockd.server.conftest import make_certificates
from tests.dflockd.server.server_support import stats, tls_flags, waiters


def test_tls(start_server: StartServer, certificates: Path) -> None:
    server = start_server(*tls_flags(certificates), "--orphan-ttl", "60")
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    watcher, client = server.connect(context=context), server.connect(context=context)
    assert client.ask("ping") == "ok"
    client.lock("k", "0 60")
    waiter = server.connect(context=context)
    waiter.request("l", "k", 30)
    eventually(lambda: waiters(watcher, "k") == 1)
    assert isinstance(client.sock, ssl.SSLSocket)
    client.sock.unwrap().close()  # a clean end: nothing is orphaned
    granted(waiter.line())
    # Who does not speak TLS gets no further, and no lock.
    plain = server.connect()
    plain.request("l", "k2", 0)
    plain.sock.settimeout(PATIENCE)
    assert b"ok" not in plain.sock.recv(4096)
    assert "Traceback" not in "".join(server.log)
    server.signal(signal.SIGTERM)
    assert watcher.line() == ""


@pytest.mark.parametrize(("end", "orphaned"), [("close", False), ("reset", True)])
def test_tls_peers_that_leave_without_its_farewell(
    start_server: StartServer, certificates: Path, end: str, orphaned: bool
) -> None:
    """A process that is killed: its kernel closes the connection, and speaks no TLS."""
    server = start_server(*tls_flags(certificates), "--orphan-ttl", "60")
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    watcher, holder = server.connect(context=context), server.connect(context=context)
    holder.lock("k", "0 60")
    getattr(holder, end)()
    eventually(lambda: stats(watcher)["connections"] == 1)
    assert len(stats(watcher)["locks"]) == orphaned


def test_tls_client_certificates(start_server: StartServer, certificates: Path) -> None:
    server = start_server(*tls_flags(certificates), "--tls-client-ca", str(certificates / "ca.pem"))
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
        assert server.connect(context=context).ask("ping") == "ok"
    assert "CERTIFICATE" in server.wait_for_log("the TLS handshake failed: ")
    context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    assert server.connect(context=context).ask("ping") == "ok"
    assert "Traceback" not in "".join(server.log)


def test_until_when_a_certificate_is_good(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    for name in ("server.pem", "ca.pem"):
        said = subprocess.run(
            ["openssl", "x509", "-in", name, "-noout", "-enddate"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        expected = ssl.cert_time_to_seconds(said.strip().removeprefix("notAfter="))
        assert not_after(str(tmp_path / name)) == expected
    junk = tmp_path / "junk.pem"
    whole = (tmp_path / "server.pem").read_text()
    for text in ("", "no certificate", whole[: len(whole) // 2], whole[:60] + whole[200:]):
        junk.write_text(text)
        assert not_after(str(junk)) == 0
    assert not_after(str(tmp_path / "none.pem")) == 0


def expired(where: Path) -> Path:
    """Make a client certificate in `where`, for the key there, that is out of date."""
    openssl = ["openssl", "x509", "-req", "-in", "old.csr", "-CA", "ca.pem", "-CAkey", "ca.key"]
    wanted = ["openssl", "req", "-new", "-key", "client.key", "-subj", "/CN=old", "-out", "old.csr"]
    for command in (wanted, [*openssl, "-days", "-1", "-out", "old.pem"]):
        subprocess.run(command, cwd=where, check=True, capture_output=True)
    return where / "old.pem"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("face", ["sync", "asyncio"])
def test_a_client_is_told_why_its_certificate_is_refused(
    start_server: StartServer,
    certificates: Path,
    other_certificates: Path,
    version: ssl.TLSVersion,
    face: str,
) -> None:
    server = start_server(*tls_flags(certificates), "--tls-client-ca", str(certificates / "ca.pem"))
    is_new = version is ssl.TLSVersion.TLSv1_3
    refused = [
        (None, None, "certificate required" if is_new else "handshake failure"),
        (other_certificates / "client.pem", other_certificates / "client.key", "unknown ca"),
        (expired(certificates), certificates / "client.key", "certificate expired"),
    ]
    for certificate, key, why in refused:
        context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        context.maximum_version = version
        if certificate is not None:
            context.load_cert_chain(certificate, key)
        options = {"servers": [("127.0.0.1", server.port)], "ssl_context": context}
        with face_named(face) as client, pytest.raises(UnreachableError) as caught:
            client.do(client.module.DistributedLock("k", **options).acquire())
        assert str(caught.value).endswith(f": the server ended TLS and says: {why}")


def test_a_client_that_is_too_late_to_ask_is_told_why_as_well(
    start_server: StartServer, certificates: Path
) -> None:
    server = start_server(*tls_flags(certificates), "--tls-client-ca", str(certificates / "ca.pem"))
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    route = Route(Address("127.0.0.1", server.port), None, context)
    link = drive(dial(route, clock.now() + PATIENCE))
    try:
        server.wait_for_log("the TLS handshake failed: ")

        def asks_in_vain() -> bool:
            try:
                link.begin(b"ping\n_\n_\n")
            except ssl.SSLError as exc:
                return reason(exc).endswith("certificate required")
            return False

        eventually(asks_in_vain)
    finally:
        link.close()
