"""The way to the server in charge, with times that are made up."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd import errors
from dflockd.address import Address
from dflockd.client.flow import Pause
from dflockd.client.routing import DENIED, LOAD_LOOK, LOAD_TURN, LONGEST_RETRY, MAX_HOPS, ShardMap
from tests.dflockd.client.routing_support import (
    DRAINING,
    GONE,
    KEY,
    NOW,
    A,
    Ask,
    B,
    C,
    Load,
    known,
    moved,
    recovering,
    report,
    seeds,
    walk,
)

# The path.


def test_the_owner_is_asked() -> None:
    assert walk(known(B)).step == Ask(B, 10)
    assert walk(known(B), None).step == Ask(B, None)
    assert walk(known(B), first=C).step == Ask(C, 10)


def test_the_map_is_loaded_first() -> None:
    to = walk(ShardMap(seeds(A, B)))
    assert isinstance(to.step, Load)
    first = to.step.server
    step = to(GONE, after=1)
    assert isinstance(step, Load)
    assert {first, step.server} == {A, B}
    assert to(report=report(C), after=1) == Ask(C, 8)


def test_no_server_can_be_reached() -> None:
    to = walk(ShardMap(seeds(A, B)))
    to(GONE)
    with pytest.raises(errors.UnreachableError, match="no server of cluster://a:6388,b:6388"):
        to(GONE)


def test_one_that_is_not_ready_counts_as_reached() -> None:
    to = walk(ShardMap(seeds(A, B)))
    to(DRAINING)
    assert isinstance(to(GONE), Pause)
    assert isinstance(to(), Load)


def test_moved_is_followed() -> None:
    shards = known(A)
    to = walk(shards)
    assert to(moved(B), after=3) == Ask(B, 7)
    assert shards.owner_of(KEY) == B


def test_moved_of_the_past_is_not_followed() -> None:
    to = walk(known(A, 9))
    assert isinstance(to(moved(B, 8), after=0.1), Load)
    assert to.step.server != A  # type: ignore[union-attr]
    assert isinstance(to(report=report(A, 9)), Pause)
    assert to() == Ask(A, pytest.approx(9.9))


def test_moved_of_the_past_is_followed_where_the_owner_goes_on_to_say_so() -> None:
    path = walk(known(epoch=9))
    assert path.step == Ask(A, 10)
    while path.step != Ask(B, 10 - DENIED):
        step = path.step
        if isinstance(step, Load):
            path(report=report(B, 7))
        elif isinstance(step, Pause):
            path(after=DENIED / 4)
        else:
            assert step[0] == A
            path(moved(B, 7))


def test_hops_come_to_a_pause() -> None:
    to = walk(known(A))
    for number in range(MAX_HOPS):
        assert isinstance(to(moved((B, A)[number % 2])), Ask)
    pauses = []
    for number in range(4):
        step = to(moved((B, A)[number % 2]))
        assert isinstance(step, Pause)
        pauses.append(step.seconds)
        assert isinstance(to(), Ask)
    assert pauses[0] == 0
    assert 0.05 <= pauses[1] < pauses[2] < pauses[3] <= 0.25
    # A long wait has ended: it begins anew.
    assert isinstance(to(moved(B), after=2), Ask)


def test_recovering_is_asked_again() -> None:
    to = walk(known(A))
    step = to(recovering(0.2))
    assert isinstance(step, Pause)
    assert 0.2 <= step.seconds <= 0.25
    step = to()
    assert isinstance(step, Ask)
    assert step.server == A
    for _ in range(2):
        step = to(recovering(30))
        assert isinstance(step, Pause)
        assert LONGEST_RETRY <= step.seconds <= LONGEST_RETRY * 1.25
        to()


def test_recovering_for_long_is_rechecked_elsewhere() -> None:
    to = walk(known(A), None)
    loads = []
    for _ in range(20):
        to(recovering(0.5))
        if isinstance(to(), Load):
            loads.append(to.step)
            to(GONE)
            to(report=report(A))
        assert isinstance(to.step, Ask)
        assert to.step.server == A
    assert len(loads) == 5
    assert A not in {step.server for step in loads}  # type: ignore[union-attr]


def test_nobody_else_knows_of_it_either() -> None:
    to = walk(known(A), None)
    for _ in range(4):
        to(recovering(0.5))
        to()
    assert isinstance(to.step, Load)
    to(GONE)
    to(GONE)
    assert to(GONE) == Ask(A, None), "it can be reached: it is asked again"


@pytest.mark.parametrize("error", [GONE, DRAINING])
def test_another_one_knows(error: errors.RemoteError) -> None:
    to = walk(known(A))
    step = to(error, after=0.5)
    assert isinstance(step, Load)
    assert step.server in (B, C)
    assert to(report=report(C, 8)) == Ask(C, 9.5)


def test_others_of_the_process_have_asked_meanwhile() -> None:
    shards = known(A)
    to = walk(shards, None)
    shards.update(report(B, 8), C, NOW + 5)
    assert to(GONE, after=10) == Ask(B, None)


def test_one_of_a_process_loads_the_map_for_all() -> None:
    shards = ShardMap(seeds(A, B))
    one, other = walk(shards), walk(shards)
    assert isinstance(one.step, Load)
    assert isinstance(other.step, Pause)
    for _ in range(3):
        assert isinstance(other(), Pause)
    one(report=report(C), after=0.05)
    assert other() == Ask(C, pytest.approx(9.95, abs=0.02))
    assert isinstance(walk(ShardMap(seeds(A, C))).step, Load), "of another cluster"


def test_others_load_it_again_if_that_takes_long() -> None:
    shards = known(A)
    one, other = walk(shards), walk(shards, 0.05)
    assert isinstance(one(GONE), Load)
    assert isinstance(other(GONE), Pause)
    late = walk(shards)
    late(GONE, after=0.05)
    paused = 0.0
    while isinstance(late.step, Pause):
        paused += late.step.seconds
        late()
    assert isinstance(late.step, Load)
    assert LOAD_TURN - 0.05 <= paused <= LOAD_TURN - 0.05 + 2 * LOAD_LOOK
    while isinstance(other.step, Pause):
        other()
    assert isinstance(other.step, Load), "its own time is over"
    assert other.now == pytest.approx(NOW + 0.05)


def test_who_has_no_time_loads_it_without_waiting_for_others() -> None:
    shards = known(A)
    one, other = walk(shards), walk(shards, 0)
    assert isinstance(one(GONE), Load)
    assert isinstance(other(GONE), Load)


def test_who_gives_up_while_it_loads_the_map_holds_nobody_up() -> None:
    for end in (lambda path: path.close(), lambda path: path.throw(KeyboardInterrupt())):
        shards = known(A)
        one = walk(shards)
        assert isinstance(one(GONE), Load)
        with contextlib.suppress(KeyboardInterrupt), one.time():
            end(one._flow)
        assert isinstance(walk(shards)(GONE), Load)
    shards = ShardMap(seeds(A, B))
    one = walk(shards)
    one(GONE)
    with pytest.raises(errors.UnreachableError):
        one(GONE)
    assert isinstance(walk(shards).step, Load)


def test_nobody_waits_for_one_after_the_other() -> None:
    """A hundred whose servers say nothing are not a queue in which each waits for all before it."""
    shards = known(A)
    walks = [walk(shards, None) for _ in range(100)]
    for each in walks:
        each(GONE)
    while pausing := [each for each in walks if isinstance(each.step, Pause)]:
        each = min(pausing, key=lambda each: each.now)
        each()
        assert each.now <= NOW + LOAD_TURN + 1e-6


def test_without_time() -> None:
    to = walk(known(A), 0)
    assert to(moved(B)) == Ask(B, 0)
    with pytest.raises(errors.RecoveringError):
        to(recovering())
    to = walk(known(A), 0)
    assert isinstance(to(DRAINING), Load)
    assert to(report=report(B, 8)) == Ask(B, 0)
    with pytest.raises(errors.UnreachableError):
        to(GONE)
    to = walk(known(A), 0)
    assert isinstance(to(DRAINING), Load)
    with pytest.raises(errors.DrainingError):
        to(report=report(A))


def test_the_last_refusal_is_raised() -> None:
    to = walk(known(A), 1)
    assert isinstance(to(GONE, after=0.5), Load)
    to(report=report(B, 8))
    step = to(recovering(10), after=0.3)
    assert step == Pause(pytest.approx(0.2))
    assert to() == Ask(B, 0), "once more at the end"
    with pytest.raises(errors.RecoveringError):
        to(recovering(10))


def test_other_errors_are_raised() -> None:
    for error in (errors.MaxLocksError("full"), errors.BadReplyError("what?")):
        with pytest.raises(type(error)):
            walk(known(A))(error)
        to = walk(ShardMap(seeds(A, B)))
        with pytest.raises(type(error)):
            to(error)


def test_a_holder_insists() -> None:
    to = walk(known(A), 5, first=A, insists=True)
    while True:
        try:
            if isinstance(to.step, Pause):
                to()
            else:
                to(GONE, after=0.01)
        except errors.RemoteError:
            break
    assert NOW + 5 <= to.now < NOW + 5.1


def test_a_holder_asks_nobody_once_its_lease_has_ended() -> None:
    to = walk(known(A), 1, insists=True)
    assert isinstance(to(recovering(0.4), after=0.9), Pause)
    with pytest.raises(errors.RecoveringError):
        to()


def test_a_refusal_that_has_come_already() -> None:
    options = {"first": A, "insists": True}
    assert walk(known(A), 5, refusal=moved(B), **options).step == Ask(B, 5)
    to = walk(known(A), 5, refusal=recovering(0.2), **options)
    assert isinstance(to.step, Pause)
    assert to.step.seconds >= 0.2
    assert to() == Ask(A, pytest.approx(4.8, abs=0.06))
    to = walk(known(A), 5, refusal=DRAINING, **options)
    assert isinstance(to.step, Load)
    assert to.step.server != A


def test_insist_on_one_server() -> None:
    to = walk(None, 1, first=A, insists=True)
    full = errors.MaxLocksError("full")
    pauses = []
    for _ in range(4):
        assert to.step == Ask(A, pytest.approx(NOW + 1 - to.now))
        assert isinstance(to(full), Pause)
        pauses.append(to.step.seconds)
        to()
    assert pauses[0] == 0
    assert 0.05 <= pauses[1] < pauses[2] < pauses[3] <= 0.25
    with pytest.raises(errors.MaxLocksError):
        to(full, after=1)


def test_one_server_is_asked_once_more_where_it_could_not_be_reached() -> None:
    to = walk(None, first=A)
    assert to(GONE) == Pause(0)
    assert to() == Ask(A, 10)
    with pytest.raises(errors.UnreachableError):
        to(GONE)
    with pytest.raises(errors.DrainingError):
        walk(None, first=A)(DRAINING)


ADDRESSES = st.sampled_from([A, B, C, Address("d", 1)])

REFUSALS = st.one_of(
    st.builds(moved, ADDRESSES, st.integers(5, 12)),
    st.builds(recovering, st.floats(0, 30)),
    st.just(DRAINING),
    st.just(GONE),
)

REPORTS = st.builds(report, st.sampled_from([A, B, C, None]), st.integers(5, 12))

NO_REPORTS = st.sampled_from([GONE, DRAINING, recovering()])


# Whatever comes.


@given(st.data(), st.sampled_from([0.0, 0.7, 2.0]), st.booleans(), st.booleans())
def test_whatever_comes(data: st.DataObject, timeout: float, loaded: bool, insists: bool) -> None:
    """It ends when the time is over, pauses in time, and hops in a row have a bound."""
    shards = known(A) if loaded else ShardMap(seeds(A, B, C))
    to = walk(shards, timeout, insists=insists)
    until = NOW + timeout
    hops = asks_after = loads_after = 0
    raised = last = None
    while raised is None:
        step, is_over = to.step, to.now >= until
        error, found = None, None
        took = data.draw(st.sampled_from([0.01, 0.1]))
        if isinstance(step, Pause):
            assert not is_over
            assert 0 <= step.seconds <= until - to.now + 1e-6
            hops, took = 0, 0.0
        elif isinstance(step, Load):
            loads_after += is_over
            found = data.draw(st.none() | REPORTS)
            error = None if found else data.draw(NO_REPORTS)
        else:
            assert step.timeout == pytest.approx(max(0.0, until - to.now))
            asks_after += is_over
            assert not (is_over and insists and last), "a lease that has ended is not renewed"
            error = last = data.draw(REFUSALS)
            hops = hops + 1 if isinstance(error, errors.MovedError) else 0
            assert hops <= MAX_HOPS + 1
        try:
            to(error, report=found, after=took)
        except errors.RemoteError as exc:
            raised = exc
    if to.now < until:
        assert "no server of cluster://" in str(raised)
        assert not insists
    elif last is not None:
        assert raised is last or "no server of cluster://" in str(raised)
    assert asks_after <= MAX_HOPS + 5
    assert loads_after <= 8
