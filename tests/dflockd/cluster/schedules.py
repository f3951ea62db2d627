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


def run_chains(seed: int) -> Counter[str]:
    return World(seed, Rules(chains=True)).run().counts


def run_stops(seed: int) -> Counter[str]:
    return World(seed, Rules(stops=True)).run().counts


def run_replaces(seed: int) -> Counter[str]:
    return World(seed, Rules(replaces=True)).run().counts


def run_hangs(seed: int) -> Counter[str]:
    return World(seed, Rules(hangs=True)).run().counts


def run_parts(seed: int) -> Counter[str]:
    return World(seed, Rules(parts=True)).run().counts


def run_by(rules: Rules, seed: int) -> Counter[str]:
    return World(seed, rules).run().counts


TOGETHER = Rules(ages=True, groups=True, rates=True)
