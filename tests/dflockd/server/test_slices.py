"""Who has the event loop for how long."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Generator

import pytest

from dflockd.server import Slices, slices
from tests.dflockd.server.session_support import give_time

pytestmark = pytest.mark.asyncio


@pytest.fixture
async def shared() -> AsyncIterator[Slices]:
    """One of which nothing fails that nobody hears of."""
    failed = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    yield Slices()
    assert failed == []


@pytest.fixture
async def short(shared: Slices) -> Slices:
    """One for which each look at the clock finds that it is too late for more."""
    give_time(shared, -1.0)
    shared.rest = 0.0
    return shared


def counting(done: list[int], number: int, rounds: int) -> Generator[None, None, int]:
    for _ in range(rounds):
        done.append(number)
        yield
    return number


async def test_a_turn_is_over_once_its_time_is_up(shared: Slices) -> None:
    assert not shared.is_over(100.0)
    # It is not known when this turn has begun: so the time is counted from here.
    assert not shared.is_over(100.0 + slices.TURN * 0.9)
    assert shared.is_over(100.0 + slices.TURN)
    assert shared.is_over(200.0)
    await asyncio.sleep(0)
    now = shared.free_until - slices.TURN
    assert not shared.is_over(now)
    assert not shared.is_over(now + slices.TURN)
    assert shared.is_over(now + 2.5 * slices.TURN)


async def test_steps_are_done_one_by_one_in_turn(short: Slices) -> None:
    done = list[str]()

    def work(item: str) -> None:
        done.append(item)

    for name in "ab":
        short.go_on(slices.in_steps([name] * 3, work))
    for turn in range(1, 7):
        await asyncio.sleep(0)
        assert len(done) == turn
    assert "".join(done) == "ababab"


async def test_what_is_little_is_done_at_once_and_in_its_order(shared: Slices) -> None:
    done = list[int]()
    shared.do(slices.in_steps([1, 2, 3], done.append))
    assert done == [1, 2, 3]
    shared.slice = -1.0
    shared.do(slices.in_steps([4, 5], done.append))
    shared.do(slices.in_steps([6], done.append))
    assert done == [1, 2, 3, 4]
    while len(done) < 6:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert done == [1, 2, 3, 4, 5, 6]


async def test_the_more_wait_the_less_each_goes_on(shared: Slices) -> None:
    assert shared.share() == slices.SLICE
    shared.go_on(lambda _until: False)
    assert shared.share() == slices.SLICE / 2


async def test_who_could_not_be_served_comes_before_who_goes_on(short: Slices) -> None:
    done = list[str]()

    def once(item: str) -> slices.Work:
        def step(_until: float) -> bool:
            done.append(item)
            return False

        return step

    short.go_on(slices.in_steps("abc", done.append))
    for each in "xyz":
        short.wait(once(each))
        await asyncio.sleep(0)
    assert "".join(done) == "xaybzc"


async def test_a_step_that_fails_keeps_nobody_from_the_next(shared: Slices) -> None:
    done, failed = list[int](), list[str]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failed.append(str(context["exception"])))

    def fail(_until: float) -> bool:
        raise ValueError("broken")

    shared.wait(fail)
    shared.wait(slices.in_steps([1], done.append))
    while not done:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert failed == ["broken"]


async def test_looks_go_on_round_robin_and_return_what_they_come_to(short: Slices) -> None:
    done = list[int]()
    seen = await asyncio.gather(*(short.seen(counting(done, each, 3)) for each in range(4)))
    assert seen == [0, 1, 2, 3]
    assert done == [0, 1, 2, 3] * 3


async def test_between_looks_the_loop_does_other_things(shared: Slices) -> None:
    shared.look_for, shared.rest = -1.0, 0.02
    others, seen = 0, list[int]()

    def look() -> Generator[None, None, None]:
        for _ in range(4):
            seen.append(others)
            yield

    task = asyncio.create_task(shared.seen(look()))
    started = asyncio.get_running_loop().time()
    while not task.done():
        others += 1
        await asyncio.sleep(0)
    assert all(later > before for before, later in itertools.pairwise(seen))
    assert asyncio.get_running_loop().time() - started >= 0.05


async def test_one_looks_at_once_and_the_others_after_a_rest(shared: Slices) -> None:
    shared.rest = 0.02
    loop, done = asyncio.get_running_loop(), list[int]()
    began = loop.time()
    assert shared.may_look()
    assert not shared.may_look()
    await shared.seen(counting(done, 1, 1))
    assert loop.time() - began >= 0.02
    assert not shared.may_look(), "that was a look too"
    while not shared.may_look():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert loop.time() - began >= 0.04


async def test_the_first_look_does_not_wait_for_a_rest(shared: Slices) -> None:
    shared.rest = 3600.0
    shared.look(None for _ in counting([], 1, 1))
    assert shared._timer is not None
    assert shared._timer.when() <= asyncio.get_running_loop().time()
    shared.stop()


async def test_nothing_is_looked_at_for_who_has_gone(short: Slices) -> None:
    done = list[int]()
    tasks = [asyncio.create_task(short.seen(counting(done, each, 3))) for each in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[1].cancel()
    assert await asyncio.wait_for(tasks[2], 30) == 2
    assert done == [2, 2, 2]


async def test_what_goes_wrong_is_for_who_asked(shared: Slices) -> None:
    def broken() -> Generator[None, None, None]:
        yield
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await shared.seen(broken())
    assert await shared.seen(counting([], 7, 2)) == 7


async def test_after_the_end_nothing_is_looked_at(shared: Slices) -> None:
    done = list[int]()
    shared.look(None for _ in counting(done, 1, 1))
    shared.stop()
    await asyncio.sleep(0.01)
    assert not done
