"""A cluster in one process: real nodes and tables, a store and clients, and a clock that is turned.

    world = World(seed=42)
    world.run()

One random number generator decides everything, so a seed replays exactly. Messages are delayed, lost
and overtaken; answers of the store are lost after the transaction was carried out, or it is carried
out long after its sender gave up; processes are stopped, killed and started again; clocks run at
different rates; the store takes servers for dead too early, and is cut off. Everything that must
hold is judged at every step, and what does not raises `ViolationError`, whose text tells the end of
the story.
"""

from tests.dflockd.cluster.simulation.client import Client, Life
from tests.dflockd.cluster.simulation.machines import (
    KEYS,
    PREFIX,
    Connection,
    Rules,
    ViolationError,
)
from tests.dflockd.cluster.simulation.world import World

__all__ = ["KEYS", "PREFIX", "Client", "Connection", "Life", "Rules", "ViolationError", "World"]
