"""How often the same failure at one server is logged at WARNING."""

from __future__ import annotations

from logging import INFO, WARNING
from types import SimpleNamespace

import pytest

from dflockd.client import outage


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the client: its last element is the time."""
    times = [1000.0]
    # Not the clock of the thread that renews.
    monkeypatch.setattr(outage, "clock", SimpleNamespace(now=lambda: times[-1]))
    monkeypatch.setattr(outage, "_warned_at", {})
    return times


def test_once_a_minute_for_each_server(times: list[float]) -> None:
    assert [outage.level("a"), outage.level("a"), outage.level("b")] == [WARNING, INFO, WARNING]
    times.append(times[-1] + outage.PAUSE - 1)
    assert outage.level("a") == INFO
    times.append(times[-1] + 1)
    assert [outage.level("a"), outage.level("a")] == [WARNING, INFO]


def test_another_clock(times: list[float]) -> None:
    """A process that goes on from a snapshot may have one that began later."""
    assert outage.level("a") == WARNING
    times.append(1.0)
    assert outage.level("a") == WARNING


def test_servers_without_number(times: list[float]) -> None:
    for number in range(10 * outage.MOST):
        assert outage.level(f"server-{number}") == WARNING
    assert len(outage._warned_at) <= outage.MOST
