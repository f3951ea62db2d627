"""What chance has go wrong in a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dflockd.cluster.transactions import Kind
from tests.dflockd.cluster.simulation.machines import CALM, SERVERS

if TYPE_CHECKING:
    from tests.dflockd.cluster.simulation.world import World

STOPS = (4.0, 15.0, 26.0)
"""When all servers are stopped, in schedules of nothing else."""


def trouble(world: World) -> None:
    """Have a lot go wrong."""
    rng = world.random
    shards = range(world.parameters.num_shards)

    def server() -> str:
        return rng.choice(SERVERS)

    def client() -> str:
        return rng.choice(list(world.clients))

    def bounce() -> None:
        shard = rng.choice(shards[:2])
        for number in range(rng.randint(2, 6)):
            world.after(number * rng.uniform(0.01, 0.5), world.move, shard, server())

    faults: list[Callable[[], None]] = [
        lambda: world.crash(server(), rng.choice((0.1, 1, 6, 12))),
        lambda: world.crash(client(), rng.uniform(0.1, 3)),
        lambda: world.stop(server(), world.long_pause()),
        lambda: world.stop(client(), world.long_pause()),
        lambda: world.cut_store([server()], rng.uniform(1, 20)),
        lambda: world.cut_store([server()], rng.uniform(8, 20)),
        lambda: world.cut_store(SERVERS, rng.uniform(1, 8)),
        lambda: world.stop_store(rng.uniform(1, 8)),
        lambda: world.take_for_dead(server()),
        lambda: world.delete_entry(server()),
        lambda: world.lose_keep_alives(server(), rng.uniform(3, 8)),
        lambda: world.interrupt(server()),
        lambda: world.blind(server(), rng.uniform(2, 12)),
        lambda: world.cut(client(), server(), rng.uniform(1, 8)),
        lambda: world.drain(server()),
        lambda: world.move(rng.choice(shards), server()),
        lambda: world.pin(rng.choice(shards), pinned=rng.random() < 0.5),
        bounce,
        bounce,
    ]
    # A few kinds at a time: with all of them each is rare. (Groce et al., "Swarm testing", 2012.)
    chosen = rng.sample(faults, rng.randint(2, 6))
    if world.rules.chains:
        chosen += [lambda: _chain(world), lambda: world.end_at_once(server(), rng.uniform(0.1, 4))]
    if world.rules.replaces:
        world.at(rng.uniform(4, CALM - 15), world.fill_store, rng.choice((0.5, 3, 8, 14)))
        if rng.random() < 0.7:
            _replace(world)
    if world.rules.hangs:
        for _ in range(4):
            chosen.append(lambda: world.hang(rng.choice(shards), rng.uniform(1, 15)))
    for _ in range(rng.randint(3, 20)):
        world.at(rng.uniform(4, CALM - 3), rng.choice(chosen))


def stops(world: World) -> None:
    """Have all servers stopped again and again, within more or less time, and started."""
    rng = world.random

    def stop() -> None:
        world.counts["stops of all"] += 1
        within = rng.choice((0.0, 0.05, 0.5, 2.5))
        for name in SERVERS:
            world.after(rng.uniform(0, within), world.drain, name)

    for at in STOPS:
        world.at(at + rng.uniform(0, 1.5), stop)


def _replace(world: World) -> None:
    """Have the store wiped, or restored from a backup."""
    rng = world.random
    for _ in range(2):
        world.at(rng.uniform(3, 20), world.etcd.copy)
    away = rng.choice((0.0, 0.5, 3.0, 6.0))
    if rng.random() < 0.5:
        world.at(rng.uniform(6, 24), world.wipe_store, away)
        return

    def is_fine() -> bool:
        # The manual says that no other server is to run when a backup is restored.
        servers = world.servers.values()
        return all(s.alive and not s.stopped and s.keeps_up for s in servers) or world.calm

    world.at(rng.uniform(6, 24), world.when, is_fine, world.restore_store, away)


def _chain(world: World) -> None:
    """Have a shard taken over by one server after the other, within the first serving lease."""
    rng = world.random
    shard, links = rng.randrange(world.parameters.num_shards), rng.sample(SERVERS, len(SERVERS))
    world.counts["chains"] += 1

    def follow() -> None:
        if not links or world.calm:
            return
        successor, until = links.pop(), world.time + 1.5
        former = world.etcd.record(shard).current
        if rng.random() < 0.3:
            world.lose_answer(successor, Kind.CLAIM)
        how = rng.choice(("replaced", "ends", "hands over"))
        if how == "replaced":
            world.replace(shard, successor, rng.uniform(1, 10))
        else:
            world.move(shard, successor)
        if how == "ends" and former not in ("", successor):
            world.end_at_once(former, rng.uniform(0.1, 4))

        def is_taken() -> bool:
            return world.etcd.record(shard).current == successor or world.time > until

        pause = rng.choice((0.0, 0.05, 0.3))
        world.when(is_taken, world.after, pause, follow)

    world.after(0, follow)
