from __future__ import annotations

import pytest

from celery_dflock.outcome import redelivery


@pytest.fixture
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lock server is asked which runs have ended."""
    monkeypatch.setattr(redelivery, "_found", lambda _: [])


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long it has a redelivery has waited, each time. It need not wait here."""
    seen: list[float] = []
    monkeypatch.setattr(redelivery.time, "sleep", seen.append)
    return seen
