"""Hello: what a connection of our own clients begins with, and who gets in by it."""

from __future__ import annotations

import itertools
import signal
import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd import __version__
from dflockd.wire import MAX_SECRET
from tests.dflockd.raw_server import RawClient, ServerProcess, StartServer, eventually, granted
from tests.dflockd.server.server_support import inspect, tls_flags, waiters
from tests.dflockd.server.session_support import connect, make_server, say
from tests.dflockd.wire.frames import FRAMES
from tests.dflockd.wire.test_requests import READ_ONLY, REFUSED

WELCOME = f"hello ok {__version__} ages,groups,pauses,rates,slots,turns,weights"

SECRET = "open sesame"


@pytest.fixture
def guarded(start_server: StartServer, tmp_path: Path) -> ServerProcess:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return start_server("--auth-token-file", str(path))


def hello(client: RawClient, secret: str | None = None, instance: str = "here") -> str:
    tail = "" if secret is None else f" secret={secret}"
    return client.ask("hello", instance, f"version=1{tail}")


# Without a secret.


def test_it_is_answered_once(alice: RawClient) -> None:
    assert hello(alice) == WELCOME
    assert hello(alice) == hello(alice, instance="there") == "hello error"
    assert alice.ask("ping") == "ok"


def test_it_may_come_late_and_changes_nothing_of_what_is_there(
    alice: RawClient, bob: RawClient
) -> None:
    token = alice.lock("late")
    assert bob.ask("e", "late", "") == "queued"
    for client in (alice, bob):
        assert hello(client) == WELCOME
    assert alice.ask("r", "late", token) == "ok"
    granted(bob.ask("w", "late", 5))


def test_behind_a_request_that_waits_it_waits(
    server: ServerProcess, alice: RawClient, bob: RawClient
) -> None:
    token = alice.lock("before")
    bob.send(b"l\nbefore\n30\nhello\nhere\nversion=1\nping\n_\n_\n")
    eventually(lambda: waiters(server.connect(), "before") == 1)
    assert alice.ask("r", "before", token) == "ok"
    granted(bob.line())
    assert [bob.line(), bob.line()] == [WELCOME, "ok"]


def test_with_a_secret_where_there_is_none_it_is_an_error_and_may_come_again(
    alice: RawClient,
) -> None:
    token = alice.lock("none")
    assert hello(alice, SECRET) == hello(alice, "") == "hello error"
    assert hello(alice) == WELCOME
    assert hello(alice, SECRET) == "hello error"
    assert alice.ask("r", "none", token) == "ok"


@pytest.mark.parametrize(
    ("instance", "argument"),
    [("here", ""), ("here", "version="), ("here", "version=1 version=1"), ("", "version=1")],
)
def test_a_malformed_one_is_an_error_and_the_next_one_is_the_first(
    alice: RawClient, instance: str, argument: str
) -> None:
    assert alice.ask("hello", instance, argument) == "error"
    assert hello(alice) == WELCOME


def test_what_later_clients_say_of_themselves_is_passed_over(alice: RawClient) -> None:
    assert alice.ask("hello", "here", "colour=red version=9 features=x,y") == WELCOME


def test_it_says_whose_the_connection_is(server: ServerProcess, alice: RawClient) -> None:
    """The process whose connection is lost takes over its own position, and nobody else does."""
    alice.lock("whose")
    lost, other, back = (server.connect() for _ in range(3))
    for client, instance in ((lost, "here"), (other, "there"), (back, "here")):
        assert hello(client, instance=instance) == WELCOME
    asked = "acquire", "whose", "timeout=30 owner=run attempt=1"
    lost.request(*asked)
    eventually(lambda: waiters(alice, "whose") == 1)
    unnamed = server.connect()
    for client in (other, unnamed):
        assert client.ask(*asked) == "error_owner waiting 1"
    back.request(*asked)
    assert lost.line() == "error_owner waiting 1"
    assert len(inspect(alice, "whose")["waiters"]) == 1


# With one.


def test_with_the_secret_one_frame_is_enough(guarded: ServerProcess) -> None:
    client = guarded.connect()
    frame = f"hello\nhere\nversion=1 secret={SECRET}\nacquire\nk\ntimeout=0\n".encode()
    client.send(frame)
    assert client.line() == WELCOME
    granted(client.line())
    # In pieces, too, and with the other end of a line.
    client = guarded.connect()
    for byte in frame.replace(b"\n", b"\r\n"):
        client.send(bytes([byte]))
    assert [client.line(), client.line()] == [WELCOME, "timeout"]


def test_the_longest_secret(start_server: StartServer) -> None:
    server = start_server(env={"DFLOCKD_AUTH_TOKEN": "s" * MAX_SECRET})
    assert hello(server.connect(), "s" * MAX_SECRET, "i" * 64) == WELCOME
    assert hello(server.connect(), "s" * (MAX_SECRET - 1)) == "hello error_auth"


@pytest.mark.parametrize("secret", [None, "", "open", SECRET + "x", SECRET + " version=1"])
@pytest.mark.parametrize("is_in", [False, True])
def test_a_wrong_secret_ends_the_connection(
    guarded: ServerProcess, secret: str | None, is_in: bool
) -> None:
    client, watcher = guarded.connect(), guarded.connect()
    assert hello(watcher, SECRET, "watcher") == WELCOME
    if is_in:
        assert client.ask("auth", "_", SECRET) == "ok"
        client.lock("k", "0 60")
        if secret is None:
            # Who is in may just say who it is.
            assert hello(client) == WELCOME
            return
    tail = "" if secret is None else f" secret={secret}"
    more = f"hello\nhere\nversion=1 secret={SECRET}\nauth\n_\n{SECRET}\nping\n_\n_\n"
    client.send(f"hello\nhere\nversion=1{tail}\n{more}".encode())
    assert client.line() == "hello error_auth"
    assert client.line() == "", "what it has sent besides is not looked at"
    granted(watcher.ask("l", "k", 10))
    assert SECRET not in "".join(guarded.log)


def test_the_secret_may_come_by_auth_before_it(guarded: ServerProcess) -> None:
    client = guarded.connect()
    assert client.ask("auth", "_", SECRET) == "ok"
    assert hello(client, SECRET) == WELCOME
    assert client.ask("auth", "_", SECRET) == "ok"
    assert hello(client, SECRET) == "hello error"
    client.lock("k")


def test_without_room_there_is_no_answer(start_server: StartServer) -> None:
    server = start_server("--max-connections", "1", "--auth-token", SECRET)
    inside = server.connect()
    assert hello(inside, SECRET) == WELCOME
    assert hello(server.connect(), SECRET) == ""
    assert hello(server.connect(), "wrong") == "hello error_auth"
    # Who is in stays in, and makes room by leaving.
    assert hello(inside, SECRET) == "hello error"
    inside.close()
    eventually(lambda: hello(server.connect(), SECRET) == WELCOME)


def test_while_the_server_drains(start_server: StartServer) -> None:
    server = start_server("--shutdown-timeout", "60", "--auth-token", SECRET)
    holder = server.connect()
    assert holder.ask("auth", "_", SECRET) == "ok"
    token = holder.lock("k", "0 60")
    server.signal(signal.SIGTERM)
    server.wait_for_log("draining")
    assert hello(holder) == WELCOME
    assert holder.ask("acquire", "other", "timeout=0") == "error_draining"
    assert holder.ask("renew", "k", f"token={token} lease=60") == "ok 60"
    assert holder.ask("r", "k", token) == "ok"
    assert holder.line() == ""
    assert server.wait() == 0


def test_over_tls(start_server: StartServer, certificates: Path) -> None:
    server = start_server(*tls_flags(certificates), "--auth-token", SECRET)
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    assert hello(server.connect(context=context), SECRET) == WELCOME
    assert hello(server.connect(context=context), "wrong") == "hello error_auth"
    assert hello(server.connect(context=context)) == "hello error_auth"
    plain = server.connect()
    plain.request("hello", "here", f"version=1 secret={SECRET}")
    assert b"hello" not in plain.sock.recv(4096)


# Nobody gets anything without it, whatever comes in whatever order.

STRANGE = [frame for frame, _ in FRAMES + READ_ONLY] + REFUSED
STRANGE += [b"auth\n_\n%b\n" % wrong for wrong in (b"", b"open", b"x" * 5000, b"open sesame ")]
STRANGE += [
    b"hello\nhere\nversion=1 secret=%b\n" % wrong
    for wrong in (b"", b"open", b"x" * 5000, b" open sesame", b"open sesame secret=open sesame")
]
STRANGE = [
    frame for frame in STRANGE if b"\nopen sesame\n" not in frame and b"=open sesame\n" not in frame
]

HELLOS = [frame for frame in STRANGE if frame.startswith((b"hello\n", b"auth\n"))]


async def answered(*pieces: bytes) -> bytes:
    """Return what somebody is told, who must not get in."""
    server = make_server(auth_secret=b"open sesame")
    inside, stranger = connect(server), connect(server)
    await say(inside, b"hello\nhere\nversion=1 secret=open sesame\nl\nk\n0\n")
    assert inside.written.startswith(b"hello ok ")
    for piece in pieces:
        await say(stranger, piece)
    assert len(server.table) == 1
    assert server.admission.inside == 1
    if stranger.written:
        assert not stranger.session.peer.instance
        assert stranger.session._ended
    told = stranger.written
    for transport in (inside, stranger):
        transport.abort()
    return told


async def test_every_request_of_a_stranger_is_refused() -> None:
    for frame in STRANGE:
        told = await answered(frame)
        if frame.startswith(b"hello\n") and frame not in REFUSED:
            assert told == b"hello error_auth\n", frame
        elif frame[:1].islower() or frame[:1] == b"\n":
            assert told == b"error_auth\n", frame
        else:
            assert told == b"error\n", "a first line that is no command"
        assert await answered(frame + b"auth\n_\nopen sesame\n") == told


@given(
    st.lists(st.sampled_from(HELLOS) | st.sampled_from(STRANGE), min_size=1, max_size=5),
    st.lists(st.integers(0, 1 << 17), max_size=4),
)
async def test_no_order_and_no_cut_lets_a_stranger_in(frames: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frames) + b"hello\nhere\nversion=1 secret=open sesame\nping\n_\n_\n"
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    assert await answered(*pieces) in (b"error_auth\n", b"hello error_auth\n", b"error\n")
