"""When the promises of those who had a shard before were made at the latest."""

from __future__ import annotations

import pytest

from dflockd.cluster.promises import Promises


@pytest.fixture
def promises() -> Promises:
    promises = Promises(4)
    promises.claimed(0, 7, 100.0)
    promises.loaded(50, 100.0)
    return promises


def test_a_server_that_has_long_had_its_shard_is_as_old_as_its_last_sign_of_life(
    promises: Promises,
) -> None:
    promises.heard("a:1", 110.0)
    promises.heard("a:1", 113.0)
    promises.heard("b:1", 120.0)
    promises.told(60)
    assert promises.latest("a:1", promises.claimed(0, 7, 121.0), 60) == 113.0


def test_whoever_has_just_claimed_a_shard_stands_for_those_before(promises: Promises) -> None:
    promises.heard("b:1", 110.0)
    promises.claimed(0, 8, 111.0)
    promises.told(60)
    assert promises.latest("b:1", promises.claimed(0, 8, 112.0), 60) == 111.0


def test_a_claim_that_nobody_told_of_is_as_new_as_can_be(promises: Promises) -> None:
    assert promises.claimed(0, 9, 130.0) == 130.0
    assert promises.claimed(1, 0, 131.0) == 131.0
    assert promises.claimed(0, 9, 140.0) == 130.0


def test_nothing_is_said_while_a_sign_of_life_may_be_on_its_way(promises: Promises) -> None:
    promises.told(59)
    assert promises.latest("a:1", 100.0, 60) is None
    promises.told(60)
    assert promises.latest("a:1", 100.0, 60) == 100.0


def test_after_everything_is_loaded_anew_earlier_signs_of_life_do_not_count(
    promises: Promises,
) -> None:
    promises.heard("a:1", 110.0)
    promises.loaded(70, 120.0)
    assert promises.latest("a:1", promises.claimed(0, 7, 120.0), 70) == 120.0
