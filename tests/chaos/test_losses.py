"""Why a holder lost its lock: only what was in the way of its renewals excuses it."""

from __future__ import annotations

import pytest

from dflockd.cluster import ClusterParameters
from tests.chaos.history import Event
from tests.chaos.losses import losses

PARAMETERS = ClusterParameters(serving_lease=2, max_lease=14)
LEASE = 14
S = 1_000_000_000
LOST = Event("lost", 100 * S, pid=7, group=7, who="a", key="k", until=100 * S)
"""It was to be renewed from the 93rd second on."""


def fault(kind: str, start: float, end: float, group: int = 0) -> Event:
    at, until = round(start * S), round(end * S)
    return Event("fault", at, group=group, until=until, detail=f"{kind} {kind.split('-')[0]}-0")


@pytest.mark.parametrize(
    ("faults", "is_explained"),
    [
        ([], False),
        ([fault("client-stop", 92, 101, group=7)], True),
        ([fault("client-stop", 92, 101, group=8)], False),
        ([fault("link-delay", 92, 101)], True),
        ([fault("link-delay", 92, 94)], False),
        ([fault("server-kill", 94, 94.1)], True),
        ([fault("server-kill", 87, 87.1)], False),
        ([fault("server-kill", 87, 87.1), fault("etcd-stop", 92, 95)], True),
        ([fault("server-restart", 94, 94.1)], False),
        ([fault("cluster-move", 94, 94)], False),
        ([fault("client-kill", 94, 95, group=7)], False),
    ],
)
def test_what_excuses_a_loss(faults: list[Event], is_explained: bool) -> None:
    [loss] = losses([*faults, LOST], PARAMETERS, LEASE)
    assert loss.is_explained is is_explained, loss
