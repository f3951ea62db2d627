"""`dflockd top` in a real terminal, and without one, against real servers and real holders."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from dflockd.cli import main
from dflockd.sync_client import DistributedLock, DistributedSemaphore
from dflockd.top.screen import _PipedConsole
from examples.demo.stage import WAIT, LockServer
from tests import forkserver
from tests.dflockd.client_support import make_certificate
from tests.dflockd.cluster.stage import FewShards, settled
from tests.dflockd.raw_server import RawClient, granted
from tests.dflockd.top.terminal import ENTER, HIDE, LEAVE, SHOW, Terminal

TOP = (sys.executable, "-m", "dflockd", "top", "--interval", "0.2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServer]:
    with LockServer(tmp_path_factory.mktemp("top")) as server:
        yield server


class Holder(RawClient):
    """Asks for locks under a label."""

    label = ""

    def wait(self, key: str, *, seconds: int = 0, lease: int = 60) -> None:
        self.request("acquire", key, f"timeout={seconds} lease={lease} label={self.label}")

    def hold(self, key: str, *, lease: int = 60) -> str:
        self.wait(key, lease=lease)
        return granted(self.line())


@pytest.fixture
def client(server: LockServer) -> Iterator[Callable[[str], Holder]]:
    """Make clients with a label that are connected until the end of the test."""
    clients = []

    def make(label: str) -> Holder:
        clients.append(Holder(socket.create_connection((server.host, server.port), WAIT)))
        clients[-1].label = label
        return clients[-1]

    yield make
    for each in clients:
        each.close()


def top(*arguments: str) -> Sequence[str]:
    return [*TOP, *arguments]


def test_a_lock_changes_hands(server: LockServer, client: Callable[[str], Holder]) -> None:
    first, second = client("first-holder"), client("second-holder")
    token = first.hold("account:7")
    with Terminal(top("--server", server.address)) as terminal:
        terminal.wait_line("account:7", "first-holder")
        second.wait("account:7", seconds=60)
        terminal.wait_line("1 of 1 servers answer, 1 key, 1 waiting, ")
        assert terminal.wait_line("account:7", "first-holder").split()[-1] == "1"

        assert first.ask("r", "account:7", token) == "ok"

        assert terminal.wait_line("account:7", "second-holder").split()[-1] == "0"
        second.close()
        terminal.wait(lambda lines: not any("account:7" in line for line in lines), "free key")


def test_a_lease_drains_and_is_filled_by_a_renewal(
    server: LockServer, client: Callable[[str], Holder]
) -> None:
    holder = client("me")
    # What has drained is grey, or nothing where there are no colours.
    with Terminal(top("--server", server.address), env={"NO_COLOR": "1"}) as terminal:
        terminal.wait_line("1 of 1 servers answer")
        token = holder.hold("draining", lease=12)
        full = terminal.wait_line("draining", "━").count("━")
        terminal.wait(lambda lines: bars(lines, "draining") < full or None, "shorter bar")
        assert holder.ask("n", "draining", f"{token} 30").startswith("ok ")
        terminal.wait(lambda lines: bars(lines, "draining") >= full or None, "full bar")


def test_weights_count(server: LockServer) -> None:
    with (
        DistributedSemaphore("gpu", 8, 5, servers=[server.address], weight=3, label="three"),
        Terminal(top("--server", server.address), width=80) as terminal,
    ):
        terminal.wait_line("gpu", "3 of 8: three")
        with DistributedSemaphore("gpu", 8, 5, servers=[server.address], weight=2):
            terminal.wait_line("gpu", "5 of 8: three")
            terminal.type("/gpu\r")  # found, not listed
            terminal.wait_line("with 'gpu'")
            terminal.wait_line("gpu", "5 of 8: three")
        terminal.type("q")
        assert terminal.wait_end() == 0


def bars(lines: list[str], key: str) -> int:
    return next((line.count("━") for line in lines if line.startswith(key)), 100)


def test_orders_sizes_and_the_end(server: LockServer, client: Callable[[str], Holder]) -> None:
    holder = client("me")
    for number in range(30):
        holder.hold(f"key-{number:02}")
    with Terminal(top("--server", server.address, "--sort", "key"), height=10) as terminal:
        terminal.wait_line("key-00")
        assert [line[:6] for line in terminal.screen[2:9]] == [f"key-{n:02}" for n in range(7)]
        assert terminal.wait_line(
            "23 more keys, by key  s: sort  w: waiters  /: filter  h: help  q: quit"
        )
        assert len(terminal.screen) == 10

        terminal.resize(60, 15)
        terminal.wait(lambda lines: len(lines) == 15 or None, "more lines")
        assert {len(line) for line in terminal.screen} == {60}
        for order in ("by waiters", "by wait", "by age", "by key"):
            terminal.type("s")
            terminal.wait_line(order)

        terminal.type("q")
        assert terminal.wait_end() == 0
        is_left_clean(terminal)


def test_who_waits_and_what_is_filtered(
    server: LockServer, client: Callable[[str], Holder]
) -> None:
    client("shop.sync[11111111-aa] w1 pid 1").hold("account:7")
    client("shop.mail[99999999-aa] w1 pid 9").hold("mail:1")
    for number in (2, 3):
        label = f"shop.sync[{number}2222222-bb] w{number} pid {number}"
        client(label).wait("account:7", seconds=60)
    with Terminal(top("--server", server.address), width=80) as terminal:
        assert "shop.sync[11111111] w1:1" in terminal.wait_line("account:7")
        terminal.type("w")
        terminal.wait_line("sync[32222222] w3:3", "account:7", "/2")
        terminal.type("/w3")
        terminal.wait_line("show what has: w3_")
        terminal.wait(lambda lines: not any("w2:2" in line for line in lines) or None, "one alone")
        terminal.type("\r")
        terminal.wait_line("who waits, longest first, with 'w3'")
        terminal.type("w")
        terminal.wait_line("account:7", "w1:1")
        terminal.wait(lambda lines: not any("mail:1" in line for line in lines) or None, "filter")
        terminal.type("\x1b")
        terminal.wait_line("mail:1")
        terminal.type("h")
        terminal.wait_line("any key: back")
        terminal.type("q")
        assert terminal.wait_end() == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_ended_by_a_signal(server: LockServer, number: signal.Signals, status: int) -> None:
    with Terminal(top("--server", server.address)) as terminal:
        terminal.wait_line("0 keys")
        assert terminal.attributes() != terminal.before, "it reads single keys"
        terminal.process.send_signal(number)
        assert terminal.wait_end() == status
        is_left_clean(terminal)


def is_left_clean(terminal: Terminal) -> None:
    assert terminal.attributes() == terminal.before
    output = terminal.output
    assert output.count(ENTER) == output.count(LEAVE) == 1
    assert output.rfind(SHOW) > output.rfind(HIDE)
    assert b"Traceback" not in output
    assert output.endswith((LEAVE, SHOW, LEAVE + SHOW)), "nothing is left on the shell's screen"


def test_a_key_that_would_command_the_terminal(
    server: LockServer, client: Callable[[str], Holder]
) -> None:
    client("me").hold("evil:\x1b[2J\x1b]0;owned\x07")
    with Terminal(top("--server", server.address)) as terminal:
        terminal.wait_line(r"evil:\x1b[2J\x1b]0;owned\x07", "me")
        assert b"\x1b[2J" not in terminal.output
        assert b"\x1b]" not in terminal.output
        assert b"\x07" not in terminal.output


def test_a_server_that_goes_and_comes_back(tmp_path: Path, server: LockServer) -> None:
    with (
        LockServer(tmp_path) as other,
        Terminal(top("--server", server.address, "--server", other.address)) as terminal,
        DistributedSemaphore("api", 3, servers=[server.address]),
    ):
        terminal.wait_line("2 of 2 servers answer")
        other.kill()
        terminal.wait_line("1 of 2 servers answer")
        terminal.wait_line(f"lock server {other.address} cannot be reached")
        terminal.wait_line("api", "1 of 3: ")
        other.start()
        terminal.wait_line("2 of 2 servers answer")


def test_all_servers_of_a_cluster(tmp_path: Path) -> None:
    with settled(tmp_path, "--default-lease-ttl", "6", number=2, lease=6) as cluster:
        one, two = cluster.servers
        keys = [cluster.key_at(server) for server in cluster.servers]
        options = {"servers": cluster.address, "lease_ttl_s": 6, "label": "me"}
        with (
            DistributedLock(keys[0], **options),
            DistributedLock(keys[1], **options),
            Terminal(top("--server", f"cluster://{two.address}"), width=150) as terminal,
        ):
            for key, server in zip(keys, cluster.servers, strict=True):
                assert terminal.wait_line(key, "me").split()[-1] == server.address
            first = min(one.address, two.address)
            terminal.wait_line("2 of 2 servers answer, 2 keys", f"shards: {first} ")
            two.stop()
            # It has handed its shards over, and the one that is left tells of them.
            terminal.wait_line(
                "1 of 1 servers answer, 2 keys", f"shards: {one.address} {FewShards.shards}"
            )
            terminal.wait_line(keys[1], "me")


def test_without_a_terminal(server: LockServer, client: Callable[[str], Holder]) -> None:
    client("me").hold("piped")
    process = forkserver.start(top("--server", server.address), stdout=subprocess.PIPE)
    with process.stdout:
        for _ in range(2):
            found = [process.stdout.readline().decode() for _ in range(5)]
            assert found[1].startswith("1 of 1 servers answer, 1 key")
            assert found[3].startswith("piped ")
            assert found[4] == "by waiters\n"
            assert all("\x1b" not in line for line in found)
    assert process.wait(WAIT) == 0, "whoever reads it has gone"


def test_a_pipe_that_breaks_in_the_middle_of_a_picture() -> None:
    """Which is not for the console to decide: it would end the program with 1."""

    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        _PipedConsole(file=Broken()).print("1 of 1 servers answer")


def output_of(*arguments: str, **env: str) -> str:
    """What it prints first, without a terminal."""
    process = forkserver.start(
        top(*arguments), stdout=subprocess.PIPE, env={**os.environ, **env}, text=True
    )
    with process.stdout:
        try:
            return "".join(process.stdout.readline() for _ in range(4))
        finally:
            process.terminate()
            process.wait(WAIT)


def test_the_secret_of_a_server(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sesame\n")
    with LockServer(tmp_path, "--auth-token-file", str(secret)) as server:
        where = ("--server", server.address)
        for answers in (
            output_of(*where, DFLOCKD_AUTH_TOKEN="sesame"),
            output_of(*where, "--auth-token-file", str(secret)),
        ):
            assert "1 of 1 servers answer" in answers
        refused = output_of(*where, DFLOCKD_AUTH_TOKEN="wrong-one")
        assert "0 of 1 servers answer" in refused
        assert f"server {server.address} refused the auth token" in refused
        assert "wrong-one" not in refused


def test_tls(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    with LockServer(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        where = ("--server", server.address)
        assert "1 of 1 servers answer" in output_of(*where, "--tls-ca", str(cert))
        assert "certificate verify failed" in output_of(*where, "--tls")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--server", "one:x"], "server 'one:x' is malformed"),
        (["--server", "cluster://a:1", "--server", "b:1"], "give it alone"),
        (["--interval", "0"], "'0' is not a number of seconds from 0.2 to 3600"),
        (["--sort", "colour"], "invalid choice: 'colour'"),
        (["--auth-token", "sesame"], "--help lists the flags"),
        (["--auth-token-file", "/nowhere/at/all"], "cannot be read"),
        (["--tls-ca", "/nowhere/at/all"], "--tls-ca '/nowhere/at/all'"),
        (["--tls-key", "key.pem"], "--tls-cert is not"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("dflockd top: ")
    assert text in line


def test_without_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = [name for name in sys.modules if name.startswith(("rich", "dflockd.top"))]
    for name in (*loaded, "rich"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["top"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("pip install 'dflockd-py[top]'")
