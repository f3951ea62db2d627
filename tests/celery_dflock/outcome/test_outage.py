"""What a process logs of a lock server that is away: one line when it begins, one when it ends."""

from __future__ import annotations

import logging
import re
import threading
import time

import pytest

from celery_dflock.outcome import outage
from celery_dflock.outcome.outage import Outages
from tests.dflockd.raw_server import PATIENCE


@pytest.fixture
def outages() -> Outages:
    return Outages()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What has been logged, all at WARNING."""
    caplog.set_level(logging.DEBUG, "celery_dflock")
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.levelname == "WARNING"
            lines.append(record.getMessage())

    handler = Handler()
    logging.getLogger("celery_dflock").addHandler(handler)
    yield lines
    logging.getLogger("celery_dflock").removeHandler(handler)


def test_one_line_when_it_begins_and_one_when_it_ends(outages: Outages, said: list[str]) -> None:
    assert not outages.known
    begun_at = time.monotonic()
    for _ in range(500):
        outages.away("one:1", "cannot be reached: Connection refused")
    assert outages.known
    outages.over("one:1")
    outages.over("one:1")

    begun, over = said
    assert begun.startswith(
        "lock server one:1 is unavailable, its tasks are requeued until it answers: "
    )
    assert begun.endswith("cannot be reached: Connection refused")
    assert over.startswith("lock server one:1 answers again after ")
    assert int(over.split(" s, ")[0].split()[-1]) <= time.monotonic() - begun_at + 1
    assert over.endswith("tasks requeued meanwhile: 500")
    assert not outages.known


def test_what_a_server_refuses_is_no_outage(outages: Outages, said: list[str]) -> None:
    """It answers: others have their locks, and it is not said to be back."""
    for _ in range(500):
        outages.refused("one:1", "MaxRatesError", "has no room")
        outages.over("one:1")
    outages.refused("one:1", "RefusedError", "no")
    assert not outages.known
    assert said == [
        f"lock server one:1 refuses a lock, its task is requeued until it is granted: {why}"
        for why in ("has no room", "no")
    ]


def test_a_log_that_blocks_keeps_nobody_waiting(outages: Outages) -> None:
    blocks, go_on = threading.Event(), threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "one:1" in record.getMessage():
                blocks.set()
                go_on.wait(PATIENCE)

    handler = Handler()
    logging.getLogger("celery_dflock").addHandler(handler)
    thread = threading.Thread(target=outages.away, args=("one:1", "why"))
    try:
        thread.start()
        assert blocks.wait(PATIENCE)
        outages.away("one:1", "why")  # which says nothing itself
        assert thread.is_alive()
    finally:
        go_on.set()
        thread.join()
        logging.getLogger("celery_dflock").removeHandler(handler)


def test_servers_are_told_apart(outages: Outages, said: list[str]) -> None:
    outages.away("one:1", "why")
    outages.away("two:2", "why")
    outages.over("two:2")

    assert outages.known, "the first is still away"
    assert [line.split()[2] for line in said] == ["one:1", "two:2", "two:2"]


def test_one_that_comes_and_goes_is_no_flood(
    outages: Outages, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "QUIET", 1e6)
    for _ in range(100):
        outages.away("one:1", "why")
        outages.over("one:1")
    assert len(said) == 2

    monkeypatch.setattr(outage, "QUIET", 0.0)
    outages.away("one:1", "why")
    assert len(said) == 3, "after a while it is said again"


def test_a_long_one_is_said_again(
    outages: Outages, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outages.away("one:1", "why")
    monkeypatch.setattr(outage, "REMIND_AFTER", 0.0)
    outages.away("one:1", "why")
    still = r"lock server one:1 is still unavailable after \d+ s, tasks requeued since: 2: why"
    assert re.fullmatch(still, said[-1])


def test_a_server_that_is_away_at_the_start_is_said_once(outages: Outages, said: list[str]) -> None:
    outages.away("one:1", "why", tasks=0)
    outages.away("one:1", "why")
    outages.over("one:1")
    assert [line.split(" after ")[0] for line in said] == [
        "lock server one:1 is unavailable: why",
        "lock server one:1 answers again",
    ]


def test_a_child_says_it_for_itself(outages: Outages, said: list[str]) -> None:
    outages.away("one:1", "why")
    outages.after_fork()
    outages.over("one:1")
    assert len(said) == 1, "it has met no outage yet"
    outages.away("one:1", "why")
    outages.over("one:1")
    assert len(said) == 3
    assert said[-1].endswith("tasks requeued meanwhile: 1")
