"""Bytes to requests: order, pipelining, limits of a line, whatever bytes come."""

from __future__ import annotations

import socket

import pytest

from tests.dflockd.raw_server import RawClient, ServerProcess, granted
from tests.dflockd.server.server_support import queue_up, stats, takes_seconds, waiters


def test_pipelined_requests_are_answered_in_order(alice: RawClient) -> None:
    alice.send(b"l\npipe\n0\nping\n_\n_\nl\npipe\n0\nx\n\n\n")
    granted(alice.line())
    assert [alice.line() for _ in range(3)] == ["ok", "timeout", "error"]


@takes_seconds
def test_requests_behind_a_waiting_one_wait_too(alice: RawClient, bob: RawClient) -> None:
    token = alice.lock("behind")
    bob.send(b"l\nbehind\n30\nping\n_\n_\npi")
    # The rest of the last one may take its time while bob waits: the read timeout is 1 second.
    assert alice.ask("l", "behind", 2) == "timeout"
    assert alice.ask("r", "behind", token) == "ok"
    granted(bob.line())
    assert bob.line() == "ok"
    bob.send(b"ng\n_\n_\n")
    assert bob.line() == "ok"


@pytest.mark.parametrize("at_once", [True, False])
def test_more_than_4_kib_behind_a_waiting_request_is_too_much(
    server: ServerProcess, alice: RawClient, at_once: bool
) -> None:
    key = f"flood-{at_once}"
    token = alice.lock(key)
    if at_once:
        flooder = server.connect()
        flooder.send(f"l\n{key}\n30\n".encode() + b"ping\n_\n_\n" * 600)
    else:
        flooder = queue_up(server, alice, key, 30)
        flooder.send(b"ping\n_\n_\n" * 600)
    assert flooder.line() == "error"
    assert flooder.line() == ""
    assert waiters(alice, key) == 0
    assert alice.ask("r", key, token) == "ok"


def test_4_kib_behind_a_waiting_request_is_fine(server: ServerProcess, alice: RawClient) -> None:
    token = alice.lock("some")
    waiter = queue_up(server, alice, "some", 30)
    waiter.send(b"ping\n_\n_\n" * 400)
    assert alice.ask("r", "some", token) == "ok"
    granted(waiter.line())
    assert {waiter.line() for _ in range(400)} == {"ok"}


def test_d9_any_bytes_are_answered(server: ServerProcess, alice: RawClient) -> None:
    # D9: long lines and bytes that are not UTF-8 ended the connection without an answer.
    alice.send(b"l\n\xff\xfe\n0\n")
    assert alice.line() == "error"
    alice.send(b"\0\n\0\n\0\n")
    assert alice.line() == "error"
    alice.send(b"l\n" + b"k" * 70_000 + b"\n0\n")
    assert alice.line() == "error"
    assert alice.line() == ""
    assert server.connect().ask("ping") == "ok"


@pytest.mark.parametrize(
    "bad", ["n\nkept-{}\n", "n\nkept-{}\ntoken abc\n", "x\n\n\n", "l\n\n0\n", "l\na b\n0\n"]
)
def test_d10_a_malformed_request_keeps_the_connection(
    alice: RawClient, bob: RawClient, bad: str
) -> None:
    # D10: any mistake ended the connection and so released every lock of the client.
    key = f"kept-{len(bad)}"
    token = alice.lock(key, "0 30")
    frame = bad.replace("kept-{}", key)
    alice.send(frame.encode() + b"\n" * (3 - frame.count("\n")))
    assert alice.line() == "error"
    assert bob.ask("l", key, 0) == "timeout"
    assert alice.ask("n", key, token) == "ok 33"


def test_d11_an_unfinished_request_is_not_executed(server: ServerProcess, alice: RawClient) -> None:
    # D11: the last line counted as complete when the connection ended.
    client = server.connect()
    client.send(b"l\ntruncated\n0 3")
    client.sock.shutdown(socket.SHUT_WR)
    assert client.line() == ""
    assert all(row["key"] != "truncated" for row in stats(alice)["locks"])


@pytest.mark.parametrize("number", ["1_0", "+5", "-1", "1.5", "٣", "9" * 120, "3601"])
def test_d12_numbers_are_strict_and_bounded(alice: RawClient, number: str) -> None:
    # D12: a lease of 120 digits locked a key for ever.
    assert alice.ask("l", "numbers", f"0 {number}") == "error"
    assert alice.ask("e", "numbers", number) == "error"
    token = alice.lock("numbers", "0 3600")
    assert alice.ask("n", "numbers", f"{token} {number}") == "error"
    assert alice.ask("r", "numbers", token) == "ok"


def test_d13_the_line_limit_counts_the_payload(alice: RawClient, bob: RawClient) -> None:
    # D13: the line feed counted, so keys of 256 bytes were refused.
    alice.lock("k" * 256)
    bob.send(b"l\r\n" + b"k" * 256 + b"\r\n0\r\n")
    assert bob.line() == "timeout"
    assert bob.ask("l", "k" * 257, 0) == "error"
    assert bob.line() == ""
