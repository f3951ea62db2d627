"""The checker finds what is wrong, all of it, and nothing where nothing is."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos import timeline
from tests.chaos.checker import check, first_grants, over_restarts
from tests.chaos.faults import FAULTS, schedule
from tests.chaos.history import Event, Recorder, read
from tests.chaos.story import IN_CONSUMER, IN_DOUBT
from tests.chaos.written import MS, attempt, died, event, kinds, pid, section

# Rates, tenants, the newest, and those of which there is one.


def rated(who: str, asked: float, begin: float) -> list[Event]:
    more: dict[str, Any] = {"starts": 2, "window": 100 * MS, "limit": 9}
    asks = [event("asked", asked, who), event("granted", begin, who)]
    return [*asks, *section(who, begin, begin + 1, **more)]


def test_as_many_as_the_rate_may_begin_in_a_window() -> None:
    first, second = rated("a", 0, 5), rated("b", 20, 25)
    assert kinds(first, second, rated("c", 90, 101)) == []
    assert kinds(first, second, rated("c", 90, 99)) == ["too many starts"]


def test_who_waited_may_have_begun_long_before_it_said_so() -> None:
    assert kinds(rated("a", 0, 90), rated("b", 85, 90), rated("c", 101, 102)) == []


def test_a_tenant_has_one_of_the_slots() -> None:
    red, blue = section("a", 0, 10, limit=3, tenant="r"), section("b", 5, 9, limit=3, tenant="b")
    again = section("c", 8, 12, limit=3, tenant="r")
    assert kinds(red, blue) == []
    assert kinds(red, blue, again) == ["overlap of a tenant"]
    assert kinds(red, blue, event("broken", 7), again) == []


def sent(task: str, at: float, key: str, **more: Any) -> Event:
    return event("sent", at, key=key, task=task, **more)


def test_a_task_gives_way_to_one_that_was_sent_later() -> None:
    both = [sent("old", 0, "newest-k"), sent("new", 5, "newest-k"), done("new", 30)]
    right = event("superseded", 20, "a", "newest-k", task="old", detail="new")
    assert kinds(both, right) == []
    wrong = event("superseded", 20, "a", "newest-k", task="new", detail="old")
    assert kinds(both, wrong, done("old", 30)) == ["the newest lost"]
    doubted = [sent("old", 0, "newest-k"), sent("new", 5, "newest-k", detail=IN_DOUBT)]
    assert kinds(doubted, wrong, done("old", 30), done("new", 30)) == []


def done(task: str, at: float) -> Event:
    return event("done", at, task=task)


def test_one_task_at_a_time_is_on_its_way() -> None:
    first, second = sent("a", 0, "once-k", until=1), sent("b", 50, "once-k", until=51)
    ends = [done("a", 60), done("b", 90)]
    assert kinds(first, second, ends) == ["sent twice"]
    assert kinds(first, second, done("a", 50.5), done("b", 90)) == []
    assert kinds(first, sent("b", 50, "once-k", until=51, detail=IN_DOUBT), ends) == []
    assert kinds(first, second, ends, event("fault", 40, detail="server-kill server-0")) == []
    moved = event("fault", 40, detail="cluster-move cluster-0")
    assert kinds(first, second, ends, moved) == ["sent twice"]


# Overlaps.


def test_sections_that_follow_each_other_do_not_overlap() -> None:
    assert kinds(section("a", 0, 10), section("b", 10, 20)) == []


def test_sections_at_once_overlap() -> None:
    assert kinds(section("a", 0, 10), section("b", 9, 20)) == ["overlap"]


def test_sections_of_different_keys_do_not_overlap() -> None:
    assert kinds(section("a", 0, 10, key="x"), section("b", 9, 20, key="y")) == []


def test_as_many_as_the_limit_may_hold_at_once() -> None:
    three = [section(who, 0, 10, limit=3) for who in "abc"]
    assert kinds(*three) == []
    assert kinds(*three, section("d", 5, 6, limit=3)) == ["overlap"]


def test_what_goes_on_beyond_its_lease_is_no_holder() -> None:
    late = section("a", 0, 30, until=10, held=False)
    assert kinds(late, section("b", 10, 20)) == []
    assert kinds(late, section("b", 9, 20)) == ["overlap"]


def test_what_begins_after_its_lease_is_no_holder() -> None:
    late = section("a", 5, 30, until=4, held=False)
    assert kinds(section("b", 0, 20), late) == []


def test_who_was_interrupted_as_it_began_is_no_holder_once_it_has_released() -> None:
    interrupted = event("begin", 1, "a", until=90)
    released = event("released", 9, "a")
    superseded = event("superseded", 9.5, "a", detail="b")
    assert kinds(interrupted, released, superseded, section("b", 10, 20)) == []
    assert kinds(interrupted, released, superseded, section("b", 8, 20)) == ["overlap"]
    assert kinds(interrupted, released, section("b", 10, 20)) == ["overlap"]


def test_who_takes_a_lock_to_be_held_beyond_its_lease_is_a_holder() -> None:
    assert kinds(section("a", 0, 30, until=10), section("b", 10, 20)) == ["overlap"]


def test_who_was_told_of_the_loss_is_no_holder() -> None:
    late = [*section("a", 0, 30, until=25, held=False), event("lost", 5, "a", until=5)]
    assert kinds(late, section("b", 6, 20)) == []
    assert kinds(late, section("b", 4, 20)) == ["overlap"]


def test_a_killed_process_holds_until_its_death_or_the_end_of_its_lease() -> None:
    begin = event("begin", 0, "a", until=20)
    assert kinds(begin, died("a", 10), section("b", 10, 30)) == []
    assert kinds(begin, died("a", 10), section("b", 9, 30)) == ["overlap"]
    assert kinds(begin, died("a", 50), section("b", 20, 30)) == []
    renewed = event("renewed", 10, "a", until=30)
    assert kinds(begin, renewed, died("a", 50), section("b", 20, 30)) == ["overlap"]


def test_the_death_of_a_group_is_that_of_all_its_processes() -> None:
    begin = Event("begin", 0, pid=7, group=5, who="a", key="k", until=50 * MS)
    death = Event("died", 10 * MS, pid=5, group=5)
    assert kinds(begin, death, section("b", 10, 30)) == []


# The order of grants.


def test_fences_grow_with_the_grants() -> None:
    first = attempt("a", 0, None, 1, fence=5)
    assert kinds(first, attempt("b", 2, None, 3, fence=6)) == []
    assert kinds(first, attempt("b", 2, None, 3, fence=4)) == ["fence order"]
    assert kinds(first, attempt("b", 0.5, None, 3, fence=4)) == []  # they asked at the same time
    assert kinds(first, attempt("b", 0.5, None, 3, fence=5)) == ["fence order"]


def test_fences_grow_with_the_sections() -> None:
    first = section("a", 0, 10, fence=5)
    assert kinds(first, section("b", 11, 12, fence=6)) == []
    assert kinds(first, section("b", 11, 12, fence=4)) == ["fence order"]


def test_first_come_first_served() -> None:
    first = attempt("a", 0, 1, 20, fence=2)
    assert kinds(first, attempt("b", 2, 3, 10, fence=1)) == ["not first come, first served"]
    assert kinds(first, attempt("b", 2, 3, 30, fence=3)) == []
    assert kinds(first, attempt("b", 0.5, 3, 10, fence=1)) == []  # they asked at the same time


def test_who_waits_in_the_consumer_may_have_no_process() -> None:
    first = [
        event("asked", 0, "a", detail=IN_CONSUMER),
        event("queued", 1, "a"),
        event("granted", 20, "a", fence=2),
    ]
    assert kinds(first, attempt("b", 2, 3, 10, fence=1)) == []
    early = [event("queued", -1, "c"), event("granted", 30, "c", fence=3)]
    assert kinds(first, early) == ["not first come, first served"]


def test_who_is_requeued_asked_when_it_did_so_first() -> None:
    went = [event("asked", 0, "b1", task="t"), event("gave_up", 0.5, "b1", task="t")]
    first = attempt("a", 1, 2, 20, fence=2)
    back = [event("asked", 5, "b2", task="t"), event("granted", 10, "b2", fence=1, task="t")]
    assert kinds(went, first, back) == []
    assert kinds(first, back) == ["not first come, first served"]


def test_a_grant_that_was_noted_late_is_not_late() -> None:
    assert kinds(attempt("a", 0, 1, 20, fence=1), attempt("b", 2, 3, 10, fence=2)) == []


def test_who_waits_is_not_passed_over() -> None:
    waits = [*attempt("a", 0, 1, None), event("gave_up", 21, "a", until=20)]
    assert kinds(waits, attempt("b", 2, 3, 19, fence=1)) == ["not first come, first served"]
    assert kinds(waits, attempt("b", 2, 3, 20.5, fence=1)) == []
    left = [*attempt("a", 0, 1, None), event("gave_up", 21, "a")]  # nobody knows since when
    assert kinds(left, attempt("b", 2, 3, 19, fence=1)) == []


def test_places_do_not_outlast_connections() -> None:
    first, second = attempt("a", 0, 1, 20, fence=2), attempt("b", 2, 3, 10, fence=1)
    assert kinds(first, event("broken", 5), second) == []
    assert kinds(event("broken", 0.5), first, second) == []  # before it was noted, or after
    assert kinds(event("broken", -1), first, second) == ["not first come, first served"]


# What was lost.


def test_told_lost_within_the_lease() -> None:
    assert kinds(event("lost", 5, "a", until=6)) == ["lost within its lease"]
    assert kinds(event("lost", 6, "a", until=6)) == []


def test_a_waiter_without_an_answer_is_lost() -> None:
    asked = event("asked", 0, "a")
    assert kinds(asked) == ["lost waiter"]
    assert kinds(asked, event("granted", 1, "a", fence=1)) == []
    assert kinds(asked, event("gave_up", 1, "a")) == []
    assert kinds(asked, died("a", 1)) == []
    assert kinds(died("a", 0), event("asked", 1, "a")) == ["lost waiter"]


def test_a_task_without_a_result_is_lost() -> None:
    sent = event("sent", 0, task="t")
    assert kinds(sent, event("started", 1, "a", task="t")) == ["lost task"]
    assert kinds(sent, event("done", 1, "a", task="t")) == []


def test_a_task_that_died_with_its_worker_on_the_way_is_the_brokers_loss() -> None:
    sent, killed = event("sent", 0, task="t"), event("fault", 1, detail="worker-kill worker-0")
    assert kinds(sent, killed) == []
    assert kinds(killed, event("sent", 2, task="t")) == ["lost task"]
    asked = [event("asked", 0.5, "a", task="t"), event("gave_up", 0.6, "a", task="t")]
    assert kinds(sent, asked, killed) == ["lost task"]
    requeued = event("requeued", 0.55, "a", task="t")
    assert kinds(sent, asked, requeued, killed) == []
    again = [event("asked", 0.7, "b", task="t"), event("gave_up", 0.8, "b", task="t")]
    assert kinds(sent, asked, requeued, again, killed) == ["lost task"]


def test_a_task_that_runs_again_after_its_result() -> None:
    done = event("done", 1, "a", task="t")
    assert kinds(done, event("started", 2, "b", task="t")) == ["double run"]
    assert kinds(event("started", 0, "b", task="t"), done) == []
    assert kinds(done, died("a", 5000), event("started", 6000, "b", task="t")) == ["double run"]
    # Killed before it could acknowledge it: Celery delivers it again.
    assert kinds(done, died("a", 2), event("started", 3, "b", task="t")) == []


def test_a_task_that_its_worker_could_not_acknowledge_comes_again() -> None:
    stopping = Event("stopping", 2 * MS, group=5)
    again = [event("done", 3, "b", task="t"), event("started", 4, "c", task="t")]
    requeued = Event("requeued", 1 * MS, pid=7, group=5, who="a", key="k", task="t")
    assert kinds(stopping, requeued, again) == []
    assert kinds(requeued, again) == ["double run"]


def test_a_stale_write_must_be_refused() -> None:
    new = event("accepted", 1, "b", fence=2)
    assert kinds(new, event("accepted", 2, "a", fence=1)) == ["stale write accepted"]
    assert kinds(new, event("refused", 2, "a", fence=1)) == []
    assert kinds(new, event("accepted", 2, "b", fence=2)) == []


def test_from_the_restart_to_the_first_grant() -> None:
    events = [
        event("restarted", 0, until=300, detail="one"),
        event("granted", 200, "a", fence=1),  # of the server before, noted late
        event("granted", 500, "b", fence=2),
        event("granted", 600, "c", fence=3),
    ]
    assert first_grants(events, lambda key: "one") == [0.5]
    assert first_grants(events, lambda key: "two") == []


def test_sections_that_were_held_over_a_restart() -> None:
    events = [
        event("restarted", 10, until=20, detail="one"),
        *section("a", 0, 30, key="x"),
        *section("b", 0, 30, key="y", until=15, held=False),
        *section("c", 11, 30, key="z"),
    ]
    assert over_restarts(events, lambda key: "one") == 1
    assert over_restarts(events, lambda key: "two") == 0


# Against everything that can be counted out, over arbitrary histories.

TIMES = st.integers(0, 30)


@given(st.lists(st.tuples(TIMES, st.integers(1, 10)), max_size=8), st.integers(1, 3))
def test_overlaps_are_found_exactly_where_they_are(
    spans: list[tuple[int, int]], limit: int
) -> None:
    events = [
        e
        for number, (begin, length) in enumerate(spans)
        for e in section(f"{number}", begin, begin + length, limit=limit)
    ]
    most = max((sum(b <= at < b + n for b, n in spans) for at in range(41)), default=0)
    assert ("overlap" in kinds(events)) == (most > limit)


ATTEMPTS = st.lists(st.tuples(TIMES, TIMES, TIMES), max_size=6).flatmap(
    lambda times: st.tuples(
        st.just([sorted(three) for three in times]), st.permutations(range(len(times)))
    )
)


@given(ATTEMPTS)
def test_overtaking_is_found_exactly_where_it_is(drawn: tuple[list[list[int]], list[int]]) -> None:
    times, fences = drawn
    events = [
        e
        for number, ((asked, queued, granted), fence) in enumerate(zip(times, fences, strict=True))
        for e in attempt(f"{number}", asked, queued, granted, fence)
    ]
    both = list(zip(times, fences, strict=True))
    pairs = list(itertools.permutations(both, 2))
    overtaken = any(a[1] < b[0] and fa > fb for (a, fa), (b, fb) in pairs)
    found = kinds(events)
    assert ("not first come, first served" in found) == overtaken


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "history")
    recorder.note("begin", who="a", key="k", fence=0, held=False)
    recorder.note("asked", at=5, who="b", key="k", limit=3)
    recorder.close()
    asked, begin = read(tmp_path / "history")
    assert (asked.what, asked.at, asked.limit, asked.fence) == ("asked", 5, 3, None)
    assert (begin.what, begin.fence, begin.held) == ("begin", 0, False)


def test_a_damaged_history_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "history").write_text('{"what":"asked","at":5}\n{"what":"as')
    with pytest.raises(ValueError, match="line 2"):
        read(tmp_path / "history")


def test_a_seed_repeats_its_schedule() -> None:
    targets = ["server-0", "client-0", "link-0"]

    def faults(seed: int) -> object:
        return schedule(seed, targets, FAULTS, seconds=100, pace=3, lease=3)

    assert faults(1) == faults(1)
    assert faults(1) != faults(2)


def test_the_picture_shows_lanes_sections_and_faults() -> None:
    fault = Event("fault", 300 * MS, detail="server-kill server-0", until=600 * MS)
    events = [*section("a", 0, 1000, fence=123), fault, *section("b", 500, 1500, fence=124)]
    [finding] = check(events)
    text, svg = timeline.pictures(events, finding)
    rows = text.splitlines()
    assert rows[0].startswith("overlap: 2 holders of k")
    assert f"pid {pid('a')}" in rows[2]
    assert "123==" in rows[2]
    assert "124==" in rows[3]
    assert rows[4].startswith("server-kill server-0")
    assert svg.startswith("<svg")
    assert svg.count("<rect") == 3
