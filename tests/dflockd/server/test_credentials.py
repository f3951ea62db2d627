"""Every setting that names a file: what is in it may be exchanged under a server that runs."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dflockd import config
from tests.dflockd.raw_server import ServerProcess, StartServer
from tests.dflockd.server.test_reload import is_served, trusting

ELSEWHERE = {
    "--cluster-ca": "tests/dflockd/shards/test_etcd_tls.py",
    "--cluster-cert": "tests/dflockd/shards/test_etcd_tls.py",
    "--cluster-key": "tests/dflockd/shards/test_etcd_tls.py",
    "--cluster-password-file": "tests/dflockd/shards/test_etcd_user.py",
}
"""Those that are tested with etcd."""


class Files:
    """The files of a server, and those that are put in their place."""

    def __init__(self, directory: Path, first: Path, second: Path) -> None:
        self.directory, self.first, self.second = directory, first, second
        for name in ("ca.pem", "server.pem", "server.key"):
            shutil.copy(first / name, directory / name)
        (directory / "token").write_text("first\n")
        self.arguments = {
            "--tls-cert": directory / "server.pem",
            "--tls-key": directory / "server.key",
            "--tls-client-ca": directory / "ca.pem",
            "--auth-token-file": directory / "token",
        }

    def start(self, start_server: StartServer, *flags: str) -> ServerProcess:
        return start_server(*(word for flag in flags for word in (flag, str(self.arguments[flag]))))

    def exchange(self, *names: str, back: bool = False) -> None:
        for name in names:
            shutil.copy((self.first if back else self.second) / name, self.directory / name)


def certificate(files: Files, start_server: StartServer) -> None:
    server = files.start(start_server, "--tls-cert", "--tls-key")
    assert is_served(server, trusting(files.first))
    files.exchange("server.pem")  # which does not go with the old key
    assert is_served(server, trusting(files.first))
    assert "do not load" in server.wait_for_log("the certificates stay as they were: ")
    files.exchange("server.key")
    assert is_served(server, trusting(files.second))
    assert not is_served(server, trusting(files.first))
    files.exchange("server.pem", "server.key", back=True)
    assert is_served(server, trusting(files.first))
    files.exchange("server.pem", "server.key")
    server.signal(signal.SIGHUP)
    server.wait_for_log("certificates reloaded")
    files.exchange("server.pem", "server.key", back=True)
    assert is_served(server, trusting(files.first))


def authority(files: Files, start_server: StartServer) -> None:
    server = files.start(start_server, "--tls-cert", "--tls-key", "--tls-client-ca")
    assert is_served(server, trusting(files.first, files.first))
    files.exchange("ca.pem")
    assert not is_served(server, trusting(files.first, files.first))
    assert is_served(server, trusting(files.first, files.second))
    files.exchange("ca.pem", back=True)
    assert not is_served(server, trusting(files.first, files.second))
    assert is_served(server, trusting(files.first, files.first))


def token(files: Files, start_server: StartServer) -> None:
    server = files.start(start_server, "--auth-token-file")

    def is_let_in(secret: str) -> bool:
        return server.connect().ask("auth", "_", secret) == "ok"

    old = server.connect()
    assert old.ask("auth", "_", "first") == "ok"
    assert not is_let_in("second")
    files.arguments["--auth-token-file"].write_text("second\n")
    assert is_let_in("second")
    assert not is_let_in("first")
    files.arguments["--auth-token-file"].write_text("")  # as while it is written
    assert is_let_in("second")
    assert old.lock("k", "0")


EXCHANGES: dict[str, Callable[[Files, StartServer], None]] = {
    "--tls-cert": certificate,
    "--tls-key": certificate,
    "--tls-client-ca": authority,
    "--auth-token-file": token,
}


def test_no_setting_is_left_out() -> None:
    with_files = {setting.flag for setting in config.SETTINGS if setting.kind is config._FILE}
    assert with_files == {*EXCHANGES, *ELSEWHERE}


@pytest.mark.parametrize(
    "exchange", dict.fromkeys(EXCHANGES.values()), ids=lambda case: case.__name__
)
def test_it_is_read_for_each_new_connection(
    start_server: StartServer,
    tmp_path: Path,
    certificates: Path,
    other_certificates: Path,
    exchange: Callable[[Files, StartServer], None],
) -> None:
    exchange(Files(tmp_path, certificates, other_certificates), start_server)
