"""etcd over TLS: with the right authority and certificate, and not without; all of it is exchanged."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dflockd.files import not_after
from dflockd.shards import Put, RevisionIs, StoreUnreachableError
from dflockd.shards.credentials import EtcdTls
from dflockd.shards.etcd import EtcdStore
from examples.demo.stage import wait_until
from tests.dflockd.cluster.stage import FewShards
from tests.dflockd.raw_server import PATIENCE
from tests.dflockd.shards.certificates import Authority
from tests.dflockd.shards.etcd_process import Etcd


class TlsEtcd(Etcd):
    """An etcd that speaks TLS, and wants to see a certificate."""

    scheme = "https"
    serving = "serving client traffic securely"

    def _command(self) -> Sequence[str]:
        cert, key, ca = (str(self.directory / f"etcd.{end}") for end in ("pem", "key", "ca"))
        files = ["--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca]
        return [*super()._command(), *files, "--client-cert-auth"]


def trust(authority: Authority) -> None:
    """Have etcd shown to be what it is by this authority, and its clients as well."""
    authority.sign("etcd")
    Path(authority.path("etcd.ca")).write_text(
        Path(authority.path(f"{authority.name}.pem")).read_text()
    )


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    authority = Authority(tmp_path)
    authority.sign("client")
    trust(authority)
    return authority


@pytest.fixture
def secure_etcd(authority: Authority) -> Iterator[Etcd]:
    with TlsEtcd(authority.directory) as etcd:
        yield etcd


def tls(authority: Authority, ca: str = "ca", cert: str | None = "client") -> EtcdTls:
    path = authority.path
    if cert is None:
        return EtcdTls(path(f"{ca}.pem"))
    return EtcdTls(path(f"{ca}.pem"), path(f"{cert}.pem"), path(f"{cert}.key"))


async def test_calls_and_watches(authority: Authority, secure_etcd: Etcd) -> None:
    store = EtcdStore([secure_etcd.endpoint], timeout=10, tls=tls(authority))
    outcome = await store.txn([RevisionIs("/k", 0)], [Put("/k", b"v")])
    assert outcome.succeeded
    watch = store.watch("/k", outcome.revision)
    [event] = await anext(watch)
    assert event.key == "/k"
    await watch.aclose()
    await store.close()


async def test_neither_side_talks_to_strangers_and_it_says_why(
    authority: Authority, secure_etcd: Etcd
) -> None:
    other = Authority(authority.directory, "other")
    other.sign("stranger")
    authority.sign("late", -60)

    async def is_not_reached(identity: EtcdTls | None, why: str) -> None:
        # It looks for the reason in the second half of that.
        store = EtcdStore([secure_etcd.endpoint], timeout=6, tls=identity)
        with pytest.raises(StoreUnreachableError, match=f"no connection to etcd at .*: {why}"):
            await store.get_prefix("/")
        await store.close()

    async with asyncio.timeout(60):
        await asyncio.gather(
            is_not_reached(tls(authority, "other"), "its certificate is not accepted: .*issuer"),
            is_not_reached(tls(authority, cert=None), "it (asks for a|does not accept what)"),
            is_not_reached(
                tls(authority, cert="stranger"), "it does not accept what this side shows"
            ),
            is_not_reached(
                tls(authority, cert="late"), "the certificate in .*late.pem has expired"
            ),
            is_not_reached(tls(authority)._replace(key=authority.path("ca.key")), ".* do not load"),
            is_not_reached(None, "it does not answer"),
        )


async def test_a_file_that_is_gone_is_named(authority: Authority, secure_etcd: Etcd) -> None:
    store = EtcdStore([secure_etcd.endpoint], timeout=10, tls=tls(authority))
    await store.get_prefix("/")
    Path(authority.path("client.key")).unlink()  # noqa: ASYNC240
    await store.get_prefix("/")  # over the connection that there is
    with pytest.raises(StoreUnreachableError, match=r"client\.key' cannot be read: No such file"):
        store.renew()
    await store.get_prefix("/")
    await store.close()


@pytest.mark.parametrize("how", ["broken", "renewed"])
async def test_everything_is_exchanged_under_a_store(
    authority: Authority, secure_etcd: Etcd, how: str
) -> None:
    """Authority, certificate and key: by the next connection, or at once where that is asked for."""
    store = EtcdStore([secure_etcd.endpoint], timeout=10, tls=tls(authority))
    assert (await store.txn([], [Put("/k", b"1")])).succeeded
    secure_etcd.stop()
    new = Authority(authority.directory, "new-ca")
    trust(new)
    new.sign("client")
    Path(authority.path("new-ca.pem")).rename(authority.path("ca.pem"))  # noqa: ASYNC240
    secure_etcd.start()
    if how == "renewed":
        store.renew()
    assert (await store.txn([], [Put("/k", b"2")])).succeeded
    await store.close()


def test_servers_go_on_with_a_certificate_that_was_renewed_and_say_when_it_was_not(
    authority: Authority, secure_etcd: Etcd
) -> None:
    directory = authority.directory
    authority.sign("client", 6)
    expires = not_after(authority.path("client.pem"))
    files = tls(authority)
    arguments = ("--cluster", f"etcd://{secure_etcd.endpoint}", "--cluster-serving-lease", "2")
    for name, path in zip(("ca", "cert", "key"), files, strict=True):
        assert path is not None
        arguments += (f"--cluster-{name}", path)
    with (
        FewShards(directory, *arguments, name="server") as server,
        contextlib.closing(server.connect()) as client,
    ):
        server.wait_joined()
        wait_until(
            lambda: client.ask("l", "k", "0 30").startswith("ok") or None, PATIENCE, server.log_text
        )
        time.sleep(max(0.0, expires - time.time()))  # until then nothing is to be seen
        assert client.ask("l", "other", "0 30").startswith("ok")
        # It is noticed by the first break of the connection.
        secure_etcd.stop()
        secure_etcd.start()
        line = server.wait_log("no lock is granted or renewed until it does")
        assert "client.pem has expired, at 2" in line
        assert "handshake" not in server.log_text(), "lines of gRPC"
        authority.sign("client")
        wait_until(
            lambda: client.ask("l", "third", "0 30").startswith("ok") or None,
            PATIENCE,
            server.log_text,
        )
