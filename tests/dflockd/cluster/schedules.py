"""How simulated schedules are run, and judged."""

from __future__ import annotations

from collections import Counter

import dflockd
from dflockd.table import ShardTable
from tests.dflockd.cluster.rules import BROKEN
from tests.dflockd.cluster.simulation import Rules, World


def can_be_broken(name: str) -> bool:
    """Whether that rule can be taken out: there is no other table than the one that is compiled."""
    return not dflockd.compiled or BROKEN[name].table is ShardTable


def run(seed: int) -> Counter[str]:
    return World(seed).run().counts


def run_by(rules: Rules, seed: int) -> Counter[str]:
    return World(seed, rules).run().counts


TOGETHER = Rules(ages=True, groups=True, rates=True)
