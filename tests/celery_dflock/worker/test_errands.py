"""Errands, by themselves."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest

from celery_dflock.worker import errands
from celery_dflock.worker.errands import Errands
from tests.celery_dflock.processes import PATIENCE


def test_two_that_begin_at_once_have_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is that of one thread: a lock is given back, and then its task goes on."""
    threads: list[Any] = []
    both_make_one = threading.Barrier(2)
    real = threading.Thread

    def make(**said: Any) -> threading.Thread:
        with suppress(threading.BrokenBarrierError):
            both_make_one.wait(0.5)
        threads.append(real(**said))
        return threads[-1]

    monkeypatch.setattr(errands.threading, "Thread", make)
    jobs = Errands("test")
    done = [threading.Event() for _ in range(2)]
    callers = [real(target=jobs.run, args=[each.set]) for each in done]
    for caller in callers:
        caller.start()
    for caller, each in zip(callers, done, strict=True):
        caller.join(PATIENCE)
        assert each.wait(PATIENCE)
    for _ in threads:
        jobs.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(threads) == 1
