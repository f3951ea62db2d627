"""What ends leaves nothing that only Python's collector would find, which rarely looks for it."""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from tests.dflockd.table.histories import TableMachine, come_and_go


def left_by(seed: int, kind: dict[str, bool]) -> Counter[str]:
    """Return how much is left of what after all has ended, while the table is still there."""
    gc.collect()
    gc.disable()
    try:
        machine: TableMachine = come_and_go(seed, **kind)
        machine.teardown()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [type(each) for each in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    # Threads that other tests have left may drop something of the clients meanwhile.
    return Counter(each.__name__ for each in left if each.__module__.startswith("dflockd.table."))


@pytest.mark.parametrize(
    "kind",
    [{}, {"in_groups": True}, {"in_groups": True, "rated": True}],
    ids=["plain", "groups", "rates"],
)
def test_nothing_ends_in_a_cycle(kind: dict[str, bool]) -> None:
    found = [left_by(seed, kind) for seed in range(10)]
    # A table that a restart has dropped is one as a whole.
    judged = [each for each in found if not each["Partition"]]
    assert len(judged) > 4
    assert not any(judged), judged
