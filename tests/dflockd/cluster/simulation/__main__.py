"""Replay schedules: ``python -m tests.dflockd.cluster.simulation [--chains] [--stops] <seed>...``."""

import sys

from tests.dflockd.cluster.simulation import Rules, World

seeds = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
rules = Rules(chains="--chains" in sys.argv, stops="--stops" in sys.argv)
for seed in seeds:
    told = World(int(seed), rules).run()
    print(told.timeline())
    print(dict(told.counts))
