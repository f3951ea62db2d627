"""A worker loses its connection to the broker, and what must be left of before: nothing."""

from __future__ import annotations

from collections.abc import Callable

from tests.celery_dflock.processes import Cluster
from tests.celery_dflock.worker.waiting import present


def lose_connections(cluster: Cluster, key: str, number: int, cut: Callable[[], object]) -> None:
    """Cut the connections of a worker in whose consumer so many tasks wait; wait until all do anew.

    A position of before has the connection of before to the lock server.
    """
    before = positions(cluster, key)
    assert len(before) == number
    cut()

    def all_are_new() -> bool | None:
        now = positions(cluster, key)
        return (len(now) == number and not now & before) or None

    cluster.wait(all_are_new, f"{number} new positions for lock {key}")


def positions(cluster: Cluster, key: str) -> set[int]:
    return {each["conn_id"] for each in present(cluster.lock(key))}
