"""Until when servers may serve, for all that one of them has seen."""

from __future__ import annotations

import math

import pytest

from dflockd.cluster.parameters import ClusterParameters
from dflockd.cluster.serving_leases import ServingLeases

PARAMETERS = ClusterParameters(4, serving_lease=3, max_lease=14)
SILENCE = 3 * PARAMETERS.stretch


@pytest.fixture
def leases() -> ServingLeases:
    leases = ServingLeases(PARAMETERS)
    leases.claimed(0, 7, 100.0)
    leases.loaded(50, 100.0)
    return leases


def test_a_server_that_has_long_had_its_shard_is_as_old_as_its_last_sign_of_life(
    leases: ServingLeases,
) -> None:
    leases.heard("a:1", 110.0)
    leases.heard("a:1", 113.0)
    leases.heard("b:1", 120.0)
    leases.told(60)
    assert leases.silent_at("a:1", leases.claimed(0, 7, 121.0), 60) == 113.0 + SILENCE


def test_whoever_has_just_claimed_a_shard_stands_for_those_before(leases: ServingLeases) -> None:
    leases.heard("b:1", 110.0)
    leases.claimed(0, 8, 111.0)
    leases.told(60)
    assert leases.silent_at("b:1", leases.claimed(0, 8, 112.0), 60) == 111.0 + SILENCE


def test_a_claim_that_nobody_told_of_is_as_new_as_can_be(leases: ServingLeases) -> None:
    assert leases.claimed(0, 9, 130.0) == 130.0
    assert leases.claimed(1, 0, 131.0) == 131.0
    assert leases.claimed(0, 9, 140.0) == 130.0


def test_nothing_is_said_while_a_sign_of_life_may_be_on_its_way(leases: ServingLeases) -> None:
    leases.told(59)
    assert leases.silent_at("a:1", 100.0, 60) == math.inf
    leases.told(60)
    assert leases.silent_at("a:1", 100.0, 60) == 100.0 + SILENCE


def test_after_everything_is_loaded_anew_earlier_signs_of_life_do_not_count(
    leases: ServingLeases,
) -> None:
    leases.heard("a:1", 110.0)
    leases.loaded(70, 120.0)
    assert leases.silent_at("a:1", leases.claimed(0, 7, 120.0), 70) == 120.0 + SILENCE


def test_a_server_serves_until_so_long_after_it_asked(leases: ServingLeases) -> None:
    leases.extend(100.0)
    assert leases.lasts(102.9)
    assert not leases.lasts(103.0)
    leases.extend(99.0)
    assert leases.until == 103.0
    assert leases.hopeless_at == 103.0 + 14 * PARAMETERS.stretch
