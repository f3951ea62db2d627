"""etcd over TLS: with the right authority and certificate, and not without."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dflockd.shards import Put, RevisionIs, StoreUnreachableError
from dflockd.shards.etcd import EtcdStore
from dflockd.shards.tls import EtcdTls
from tests.dflockd.shards.etcd_process import Etcd


class TlsEtcd(Etcd):
    """An etcd that speaks TLS, and wants to see a certificate."""

    scheme = "https"
    serving = "serving client traffic securely"

    def _command(self) -> Sequence[str]:
        cert, key = str(self.directory / "cert"), str(self.directory / "key")
        files = ["--cert-file", cert, "--key-file", key, "--trusted-ca-file", cert]
        return [*super()._command(), *files, "--client-cert-auth"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not on PATH")
    where = tmp_path_factory.mktemp("etcd-tls")
    for name in ("", "other-"):
        command = (
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=x "
            f"-addext subjectAltName=IP:127.0.0.1 -keyout {name}key -out {name}cert"
        )
        subprocess.run([openssl, *command.split()], cwd=where, check=True, capture_output=True)
    return where


@pytest.fixture(scope="module")
def secure_etcd(directory: Path) -> Iterator[Etcd]:
    with TlsEtcd(directory) as etcd:
        yield etcd


def tls(directory: Path, ca: str, cert: str | None) -> EtcdTls:
    authority = (directory / f"{ca}cert").read_bytes()
    if cert is None:
        return EtcdTls(authority)
    return EtcdTls(
        authority, (directory / f"{cert}cert").read_bytes(), (directory / f"{cert}key").read_bytes()
    )


async def test_calls_and_watches(directory: Path, secure_etcd: Etcd) -> None:
    store = EtcdStore([secure_etcd.endpoint], timeout=10, tls=tls(directory, "", ""))
    outcome = await store.txn([RevisionIs("/k", 0)], [Put("/k", b"v")])
    assert outcome.succeeded
    watch = store.watch("/k", outcome.revision)
    [event] = await anext(watch)
    assert event.key == "/k"
    await watch.aclose()
    await store.close()


async def test_neither_side_talks_to_strangers(directory: Path, secure_etcd: Etcd) -> None:
    async def is_not_reached(identity: EtcdTls | None) -> None:
        store = EtcdStore([secure_etcd.endpoint], timeout=2, tls=identity)
        with pytest.raises(StoreUnreachableError):
            await store.get_prefix("/")
        await store.close()

    another_ca, none, another = (
        tls(directory, *which) for which in (("other-", ""), ("", None), ("", "other-"))
    )
    async with asyncio.timeout(60):
        await asyncio.gather(*map(is_not_reached, (another_ca, none, another, None)))


def test_the_key_is_not_shown(directory: Path) -> None:
    assert "KEY" not in repr(tls(directory, "", ""))
