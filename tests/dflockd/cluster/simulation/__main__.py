"""Replay: ``python -m tests.dflockd.cluster.simulation [--chains] [--hangs] ... <seed>...``."""

import sys

from tests.dflockd.cluster.simulation import Rules, World
from tests.dflockd.cluster.simulation.machines import KINDS

seeds = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
rules = Rules(**{kind: f"--{kind}" in sys.argv for kind in KINDS})
for seed in seeds:
    told = World(int(seed), rules).run()
    print(told.timeline())
    print(dict(told.counts))
