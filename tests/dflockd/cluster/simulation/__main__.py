"""Replay schedules: ``python -m tests.dflockd.cluster.simulation <seed>...``."""

import sys

from tests.dflockd.cluster.simulation import World

for argument in sys.argv[1:]:
    told = World(int(argument)).run()
    print(told.timeline())
    print(dict(told.counts))
