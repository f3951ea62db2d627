"""Replay: ``python -m tests.dflockd.cluster.simulation [--chains|--hangs|--stops] <seed>...``."""

import sys

from tests.dflockd.cluster.simulation import Rules, World

seeds = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
kinds = ("chains", "hangs", "stops")
rules = Rules(**{kind: f"--{kind}" in sys.argv for kind in kinds})
for seed in seeds:
    told = World(int(seed), rules).run()
    print(told.timeline())
    print(dict(told.counts))
