from __future__ import annotations

import pytest

from celery_dflock.outcome import once


@pytest.fixture
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lock server is asked which runs have ended."""
    monkeypatch.setattr(once, "_found", lambda _: set())
