"""A paused key outlives its server: real processes, 300 waiters."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.dflockd.raw_server import RawClient, granted
from tests.dflockd.storage.recovery_support import Site, inspected

WAITERS = 300


def pause_of(site: Site, key: str = "k") -> Any:
    return inspected(site.connect(), key)["paused"]


def line_up(site: Site) -> list[RawClient]:
    """So many wait for the key, in this order: each has its position before the next one asks."""
    waiters = [site.connect() for _ in range(WAITERS)]
    for waiter in waiters:
        assert waiter.ask("e", "k", 30) == "queued"
        waiter.request("w", "k", "60")
    return waiters


def all_begin_in_order(waiters: list[RawClient]) -> None:
    for number, waiter in enumerate(waiters):
        token = granted(waiter.line())
        if number < len(waiters) - 1:
            assert waiter.ask("r", "k", token) == "ok"


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_nobody_begins_while_it_is_paused_and_all_do_after(site: Site, end: str) -> None:
    holder = site.connect()
    token = holder.lock("k", "0 100")
    said = "for=600000 by=ann@w1 reason=the vendor is down"
    assert site.connect().ask("pause", "k", said) == "ok"
    site.restart(end)
    paused = pause_of(site)
    assert (paused["by"], paused["reason"]) == ("ann@w1", "the vendor is down")
    assert 500 < paused["left_s"] < 600
    holder = site.connect()
    assert holder.ask("n", "k", f"{token} 100") == "ok 100"
    waiters = line_up(site)
    assert holder.ask("r", "k", token) == "ok"
    report = inspected(site.connect(), "k")
    assert (len(report["holders"]), len(report["waiters"])) == (0, WAITERS)
    # They come back to the next server as to any that was restarted: in the order in which they ask.
    site.restart(end)
    waiters = line_up(site)
    assert site.connect().ask("l", "k", 0) == "timeout"
    assert site.connect().ask("resume", "k") == "ok"
    all_begin_in_order(waiters)
    assert site.connect().ask("resume", "k") == "error"
    site.restart(end)
    assert pause_of(site) is None


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_it_ends_on_time_over_a_restart(site: Site, end: str) -> None:
    begun = time.monotonic()
    assert site.connect().ask("pause", "k", "for=4000") == "ok"
    site.restart(end)
    waiter = site.connect()
    waiter.request("l", "k", "60")
    granted(waiter.line())
    assert time.monotonic() >= begun + 4.0
    assert pause_of(site) is None


def test_one_that_is_over_when_the_server_comes_back_is_gone(site: Site) -> None:
    assert site.connect().ask("pause", "k", "for=1") == "ok"
    site.restart()
    assert pause_of(site) is None
    site.connect().lock("k")


def test_after_a_crash_of_the_machine_it_lasts_for_all_of_its_time(site: Site) -> None:
    raw = site.connect()
    assert raw.ask("pause", "k", "for=600000 by=me") == "ok"
    assert raw.ask("pause", "endless", "reason=for good") == "ok"
    site.kill()
    site.change_boot()
    site.start()
    assert 590 < pause_of(site)["left_s"] <= 600
    assert pause_of(site, "endless")["left_s"] is None


def test_only_the_last_of_several_is_kept_and_none_that_was_resumed(site: Site) -> None:
    raw = site.connect()
    for number in range(5):
        assert raw.ask("pause", "k", f"for=600000 reason=number {number}") == "ok"
        assert raw.ask("pause", "resumed", "for=600000") == "ok"
    assert raw.ask("resume", "resumed") == "ok"
    site.restart()
    assert pause_of(site)["reason"] == "number 4"
    assert pause_of(site, "resumed") is None
