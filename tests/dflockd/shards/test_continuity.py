"""What tells a store that was wiped or restored from the one that it was."""

from __future__ import annotations

import pytest

from dflockd.shards import StoreReplacedError
from dflockd.shards.continuity import Continuity


def test_a_lower_revision_than_was_known_when_it_was_asked() -> None:
    continuity = Continuity()
    continuity.answered(continuity.asks(), 7, name="etcd")
    with pytest.raises(StoreReplacedError, match="etcd is at revision 6 and was at 7"):
        continuity.answered(continuity.asks(), 6, name="etcd")


def test_answers_that_overtake_one_another_say_nothing() -> None:
    continuity = Continuity()
    first, second = continuity.asks(), continuity.asks()
    continuity.answered(second, 9, name="etcd")
    continuity.answered(first, 8, name="etcd")
    assert continuity.revision == 9


def test_another_cluster() -> None:
    continuity = Continuity()
    continuity.answered(continuity.asks(), 7, name="etcd", cluster=0xA)
    continuity.answered(continuity.asks(), 0, name="etcd", cluster=0xA)
    with pytest.raises(StoreReplacedError, match="cluster b, and a answered before"):
        continuity.answered(continuity.asks(), 0, name="etcd", cluster=0xB)


def test_from_then_on_nothing_is_asked_and_nothing_believed() -> None:
    continuity = Continuity()
    asked = continuity.asks()
    continuity.answered(asked, 7, name="etcd")
    with pytest.raises(StoreReplacedError):
        continuity.answered(continuity.asks(), 1, name="etcd")
    with pytest.raises(StoreReplacedError):
        continuity.asks()
    with pytest.raises(StoreReplacedError):
        continuity.answered(asked, 10, name="etcd")
    continuity.begin_anew()
    continuity.answered(continuity.asks(), 1, name="etcd")


def test_begun_anew_another_cluster_is_the_one() -> None:
    continuity = Continuity()
    continuity.answered(continuity.asks(), 7, name="etcd", cluster=0xA)
    continuity.begin_anew()
    continuity.answered(continuity.asks(), 3, name="etcd", cluster=0xB)
    assert continuity.revision == 3


def test_an_answer_without_a_cluster_says_nothing_of_it() -> None:
    continuity = Continuity()
    continuity.answered(continuity.asks(), 7, name="etcd")
    continuity.answered(continuity.asks(), 8, name="etcd", cluster=0xA)
    continuity.answered(continuity.asks(), 9, name="etcd")
    assert continuity.revision == 9
