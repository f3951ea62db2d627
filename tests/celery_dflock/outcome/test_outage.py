"""What a worker logs of a lock server that is away: one line for all its processes."""

from __future__ import annotations

import logging
import os

import pytest

from celery_dflock.outcome import outage
from celery_dflock.outcome.outage import MOST, Outages


@pytest.fixture
def outages() -> Outages:
    """As a worker has them that is about to fork."""
    made = Outages()
    made.prepare()
    return made


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
    assert not outages.known[0]
    for _ in range(500):
        outages.requeued("one:1", "cannot be reached: Connection refused")
    assert outages.known[0]
    outages.over("one:1")
    outages.over("one:1")

    begun, over = said
    assert begun.startswith(
        "lock server one:1 is unavailable, its tasks are requeued until it answers: "
    )
    assert begun.endswith("cannot be reached: Connection refused")
    assert over.startswith("lock server one:1 answers again after ")
    assert over.endswith("tasks requeued meanwhile: 500")
    assert not outages.known[0]


def test_servers_are_told_apart(outages: Outages, said: list[str]) -> None:
    outages.requeued("one:1", "why")
    outages.requeued("two:2", "why")
    outages.over("two:2")

    assert outages.known[0], "the first is still away"
    assert [line.split()[2] for line in said] == ["one:1", "two:2", "two:2"]


def test_one_that_comes_and_goes_is_no_flood(
    outages: Outages, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "QUIET", 1e6)
    for _ in range(100):
        outages.requeued("one:1", "why")
        outages.over("one:1")
    assert len(said) == 2

    monkeypatch.setattr(outage, "QUIET", 0.0)
    outages.requeued("one:1", "why")
    assert len(said) == 3, "after a while it is said again"


def test_a_long_one_is_said_again(
    outages: Outages, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outages.requeued("one:1", "why")
    monkeypatch.setattr(outage, "REMIND_AFTER", 0.0)
    outages.requeued("one:1", "why")
    assert "lock server one:1 is still unavailable after 0 s, tasks requeued since: 2: why" in said


def test_a_server_that_is_away_at_the_start_is_said_once(outages: Outages, said: list[str]) -> None:
    outages.begun("one:1", "why")
    outages.requeued("one:1", "why")
    outages.over("one:1")
    assert [line.split(" after ")[0] for line in said] == [
        "lock server one:1 is unavailable: why",
        "lock server one:1 answers again",
    ]


def test_processes_count_as_one(outages: Outages, said: list[str]) -> None:
    """The children of a prefork pool say nothing that another has said."""
    children = []
    for _ in range(4):
        pid = os.fork()
        if not pid:
            for _ in range(50):
                outages.requeued("one:1", "why")
            os._exit(len(said))
        children.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert sorted(statuses) == [0, 0, 0, 1], "one of them has said it"
    outages.over("one:1")
    assert said[-1].endswith("tasks requeued meanwhile: 200"), "and none has miscounted"


def test_more_servers_than_there_is_room_for(outages: Outages, said: list[str]) -> None:
    for number in range(MOST + 5):
        outages.requeued(f"lock-{number}:1", "why")
    for number in range(MOST + 5):
        outages.over(f"lock-{number}:1")
    assert len(said) == MOST + 5 + MOST
    assert not outages.known[0]
