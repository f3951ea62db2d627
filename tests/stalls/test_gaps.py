"""One client does its worst, on a small scale; how long the others wait is judged by `make bench`."""

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("what a process waited for a core is known on Linux", allow_module_level=True)

from dflockd.wire.requests import COMMANDS
from examples.demo import stage
from tests.stalls import gaps, storms


@pytest.mark.parametrize("gap", gaps.GAPS, ids=lambda gap: gap.key)
def test_a_gap_is_found_under_every_load_by_one_client(
    gap: gaps.Gap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaps, "STORM", 0.02)
    monkeypatch.setattr(gaps, "NEWER", 0.2)
    with ExitStack() as stack:
        server = stack.enter_context(stage.LockServer(tmp_path, *gap.flags))
        prober = stack.enter_context(gaps.Prober.at(server))
        connections = stack.enter_context(ExitStack())

        assert gap.run(gaps.Crowd(server, connections), prober, 5) > 0.0


def test_every_command_has_a_storm() -> None:
    assert {command.decode() for command in COMMANDS} <= set(storms.STORMS)


def test_a_storm_asks_for_what_there_is(tmp_path: Path) -> None:
    """What is refused at once would cost a server nothing."""
    refused = {"auth", "identify", "listen", "malformed", "shards", "stable-ref"}
    with stage.LockServer(tmp_path, *gaps.UNBOUNDED) as server, ExitStack() as stack:
        crowd = gaps.Crowd(server, stack)
        storms.gather(crowd.connect(), 3)
        for number, (name, requests) in enumerate(storms.STORMS.items()):
            client, replies = storms.Client(number, crowd.connect(), requests), []
            for _ in range(4 * len(requests)):
                client.ask()
                while (reply := client.hear()) is None:
                    pass
                replies.append(reply)
            errors = sum(1 for reply in replies if reply.startswith(b"error"))
            assert name in refused or errors <= len(replies) / 2, (name, replies)


def test_a_gap_is_as_long_as_the_server_is_away(tmp_path: Path) -> None:
    with (
        stage.LockServer(tmp_path) as server,
        gaps.Prober.at(server) as prober,
        prober.watching() as found,
    ):
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(server.pid, signal.SIGCONT)

    assert found[0] > 200


def test_a_connection_has_as_many_holds_as_a_server_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaps, "HOLDS", 700)
    with stage.LockServer(tmp_path, "--max-holds", "700") as server, ExitStack() as stack:
        assert len(gaps.Crowd(server, stack).hold(1500)) == 3
