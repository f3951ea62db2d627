"""What goes wrong in a cluster, one story each: only with all rules it ends well.

Shard 0 is at the first server when they begin, and shard 1 at the second. Leases are up to 8 s, a
serving lease is 2 s, and the grace after a crash about 11 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dflockd.cluster import snapshot as snapshots
from dflockd.cluster.transactions import Kind
from dflockd.shards import Put
from dflockd.table import Snapshot
from dflockd.wire import Renew
from tests.dflockd.cluster.simulation import KEYS, PREFIX, Client, Connection, Life, World

FIRST, SECOND, THIRD = "s1:1", "s2:1", "s3:1"


def cut_off(world: World) -> None:
    """A server is cut off from the store, and clients still reach it."""
    world.at(6, world.cut_store, [FIRST], 28)
    world.visit("c1", 5, lease=3, hold=25)
    world.visit("c2", 12, lease=3, hold=8, via=SECOND)
    world.visit("c3", 20.5, lease=3, hold=3, timeout=12)


def entry_deleted(world: World) -> None:
    """Somebody deletes the entry of a server that lives, and another is told to take over."""
    world.visit("c1", 5, lease=8, hold=20)
    world.at(6, world.blind, FIRST, 20)
    world.at(6.05, world.move, 0, SECOND)
    world.at(6.1, world.delete_entry, FIRST)


def record_deleted(world: World) -> None:
    """Somebody deletes the record of a shard of which a lock is held."""
    world.visit("c1", 5, lease=8, hold=25)
    world.at(6, world.delete, f"{PREFIX}/shard/0")
    world.visit("c2", 7, lease=3, hold=3, via=SECOND)


def moved_and_deleted(world: World) -> None:
    """Somebody deletes the record of a shard that has been moved, and no lock of it is held."""
    for number in range(6):
        world.at(4 + number / 5, world.move, 0, (SECOND, THIRD)[number % 2])
    world.visit("c1", 5.5, lease=3, hold=1)
    world.at(10, world.delete, f"{PREFIX}/shard/0")
    world.visit("c2", 11, lease=3, hold=3, via=SECOND)


def handed_over_and_deleted(world: World) -> None:
    """Somebody deletes what is handed over before the next server has it."""
    world.visit("c1", 5, lease=8, hold=20)
    world.at(5.9, world.blind, SECOND, 1)
    world.at(6, world.move, 0, SECOND)
    world.at(6.5, world.delete, f"{PREFIX}.handoff/0")
    world.visit("c2", 7, lease=3, hold=3, via=SECOND)


def back_unseen(world: World) -> None:
    """A server comes back, and one that takes itself for the leader does not hear of it."""
    world.at(4, world.crash, FIRST, 0.5)

    def blind() -> None:
        world.blind(SECOND, 15)
        world.when(lambda: 0 in world.servers[FIRST].able(), world.blind, FIRST, 15)

    def is_gone() -> bool:
        return world.time > 5 and FIRST not in world.servers[SECOND].node.view.nodes

    world.at(5, world.when, is_gone, blind)


def second_life_unseen(world: World) -> None:
    """As before, but the one that came back ends again before its shard is claimed."""

    def blind() -> None:
        world.blind(SECOND, 10)
        world.at(world.time + 1.85, world.cut_store, [FIRST], 3)
        world.at(world.time + 1.9, world.take_for_dead, FIRST)

    def is_gone() -> bool:
        return FIRST not in world.servers[SECOND].node.view.nodes

    world.at(6, world.take_for_dead, FIRST)
    world.at(6, world.when, is_gone, blind)


def back_without_an_answer(world: World) -> None:
    """A server that was taken for dead is back, does not learn of it at once, and is replaced then."""
    world.at(6, world.lose_answer, FIRST, Kind.ENLIST)
    world.at(6, world.take_for_dead, FIRST)
    world.at(7.5, world.when, lambda: 0 in world.servers[FIRST].able(), world.replace, 0, SECOND)


def confirmed_for_an_earlier_life(world: World) -> None:
    """A server learns that a shard is still its own just after it was taken for dead once more."""
    etcd = world.etcd

    def depose() -> None:
        world.blind(FIRST, 10)
        world.move(0, SECOND)
        world.take_for_dead(FIRST)
        world.when(lambda: world.servers[FIRST].node.membership.wants_lease, etcd.kept_back[0])

    world.at(6, world.lose_answer, FIRST, Kind.CONFIRM)
    world.at(6, world.take_for_dead, FIRST)
    world.at(6, world.when, lambda: bool(etcd.kept_back), depose)


def deposed_in_its_promise(world: World) -> None:
    """A server is taken for dead while its serving lease lasts, and does not learn of it."""
    world.visit("c1", 5, lease=8, hold=20)
    world.at(6, world.cut_store, [FIRST], 10)
    world.at(6.05, world.move, 0, SECOND)
    world.at(6.1, world.take_for_dead, FIRST)


def _after_a_beat(world: World, name: str, since: float, act: Callable[[], None]) -> None:
    """Do something at the beginning of a serving lease."""
    former: list[float] = []

    def is_new() -> bool:
        until = world.servers[name].node.leases.until
        former.append(until)
        return until > former[0]

    world.at(since, world.when, is_new, act)


def chained(world: World) -> None:
    """A server is replaced within its serving lease, and its successor before its next heartbeat."""
    world.at(4, world.stop, FIRST, 0.35)  # from now on its heartbeats are not those of the second
    world.visit("c1", 5, lease=3, hold=20)

    def ends() -> None:
        world.move(0, THIRD)
        world.end_at_once(SECOND, 20)
        world.cut("c1", FIRST, 10)  # so that it asks the others

    def begin() -> None:
        world.replace(0, SECOND)
        world.when(lambda: world.etcd.record(0).current == SECOND, ends)

    _after_a_beat(world, FIRST, 7, begin)


def started_after_it_all(world: World) -> None:
    """As before, but the last one in the chain has only just started, and saw none of it."""
    world.at(4, world.crash, THIRD, 30)
    world.at(4, world.stop, FIRST, 0.35)
    world.visit("c1", 5, lease=3, hold=20)

    def ends() -> None:
        world.move(0, THIRD)
        world.end_at_once(SECOND, 20)
        world.start(THIRD)
        world.cut("c1", FIRST, 10)

    def begin() -> None:
        world.replace(0, SECOND)
        world.when(lambda: world.etcd.record(0).current == SECOND, ends)

    _after_a_beat(world, FIRST, 7, begin)


def signs_missed(world: World) -> None:
    """A server is replaced by one that has heard nothing for a while, and then loads everything."""
    world.visit("c1", 5, lease=3, hold=20)
    world.at(6, world.cut, "c1", FIRST, 10)

    def begin() -> None:
        world.blind(SECOND, 1.5)
        _after_a_beat(world, FIRST, world.time + 1.2, lambda: world.replace(0, SECOND))

    _after_a_beat(world, FIRST, 5, begin)


def lost_with_the_answer(world: World) -> None:
    """A shard is handed over, and the answer to the claim of its new server gets lost."""
    world.visit("c1", 5, lease=8, hold=4)
    world.visit("c2", 5.5, lease=8, hold=1)
    world.at(6, world.lose_answer, SECOND, Kind.CLAIM)
    world.at(6.1, world.move, 0, SECOND)


def tidied_late(world: World) -> None:
    """What was handed over is deleted so late that there is something new under its key."""
    world.visit("c1", 5, lease=8, hold=20)
    world.at(6, world.hold_up, Kind.TIDY, 1.0)
    world.at(6, world.move, 0, SECOND)
    world.at(6.5, world.blind, THIRD, 2)
    world.at(6.6, world.move, 0, THIRD)
    world.visit("c2", 6.7, lease=3, hold=3, via=THIRD)


def claimed_twice(world: World) -> None:
    """A server is replaced within its serving lease; the claim is not answered, and repeated."""
    world.visit("c1", 5, lease=3, hold=20)
    world.at(6, world.cut, "c1", FIRST, 10)

    def begin() -> None:
        world.lose_answer(SECOND, Kind.CLAIM)
        world.replace(0, SECOND)

    _after_a_beat(world, FIRST, 6, begin)


def renewed_at_the_end(world: World) -> None:
    """A lock is renewed at the end of the serving lease in which its server was replaced."""
    world.visit("c1", 3.75, lease=8, hold=30)
    world.at(6, world.cut_store, [FIRST], 28)
    world.at(6.05, world.move, 0, SECOND)
    world.at(6.1, world.take_for_dead, FIRST)
    for server in (SECOND, THIRD):
        world.at(6, world.cut, "c1", server, 28)
    world.visit("c2", 8, lease=3, hold=3, via=SECOND)


def handed_over_of_old(world: World) -> None:
    """What was handed over is replaced with something older, out of a backup perhaps."""
    world.visit("c1", 5, lease=8, hold=20)
    world.at(7, world.blind, SECOND, 1)
    world.at(7.1, world.move, 0, SECOND)
    old = Put(f"{PREFIX}.handoff/0", snapshots.dump(Snapshot([], []), 1, 0))
    world.at(7.5, lambda: world.etcd.space.txn([], [old]))
    world.visit("c2", 9, lease=3, hold=3, via=SECOND)


def killed_while_it_leaves(world: World) -> None:
    """A server is killed before it learns that it has handed everything over, and that comes late."""
    world.visit("c1", 5, lease=8, hold=20)
    world.at(6, world.hold_up, Kind.RELEASE, 0.8)
    world.at(6, world.drain, FIRST)
    world.at(6.3, world.crash, FIRST, 20)
    world.visit("c2", 7, lease=3, hold=3, via=SECOND)


def fast_and_slow(world: World) -> None:
    """The clock of a holder is slow, and that of its server fast."""
    world.clocks["c1"].rate, world.clocks[FIRST].rate = 0.99, 1.01
    world.visit("c1", 4, lease=8, hold=30)
    world.at(4.1, world.stop, "c1", 11)
    world.visit("c2", 5, lease=8, hold=3)


def late_release(world: World) -> None:
    """The last server gives everything up, without an answer, and then there is another one."""
    world.at(4, world.crash, SECOND, 11.9)
    world.at(4, world.crash, THIRD, 40)
    world.at(15, world.hold_up, Kind.RELEASE, 2.6)
    world.at(15, world.hold_up, Kind.ASSIGN, 4)
    world.at(15, world.drain, FIRST)
    world.visit("c2", 16.75, lease=8, hold=12)
    world.visit("c3", 19, lease=8, hold=3, via=SECOND)


def overtaken_release(world: World) -> None:
    """A shard is to go, its release hangs on the way, and it is to stay after all."""
    world.at(6, world.hold_up, Kind.RELEASE, 4)
    world.at(6, world.move, 0, SECOND)
    world.at(7, world.move, 0, FIRST)
    world.visit("c2", 8, lease=8, hold=10)
    world.visit("c3", 11, lease=8, hold=3, via=SECOND)


def restart(world: World) -> None:
    """A server is killed and starts again under its address; its client is stopped meanwhile."""
    world.visit("c1", 5, lease=8, hold=20)
    world.at(5.5, world.stop, "c1", 6.5)
    world.at(6, world.crash, FIRST, 0.1)
    world.visit("c2", 7, lease=3, hold=3)


def _nothing(_: Client) -> Life:
    yield math.inf


def stray_renewal(world: World) -> None:
    """A renewal takes its time on the way, and comes when its lock is another's and in recovery."""
    world.visit("c1", 4, lease=1, hold=0.3)
    world.visit("c2", 5, lease=8, hold=20)
    world.at(6, world.crash, FIRST, 20)

    def arrive() -> None:
        (server,) = (s for s in world.servers.values() if 0 in s.able())
        fence = (min(epoch for epoch in epochs) << 40) + 1
        token = server.table.slots.issuer.token(*KEYS[0][:2], fence, is_sole=True)
        sender = Client(world, "stray", world.clients["c1"].clock, _nothing)
        connection = Connection(sender, server)
        server.receive(server.handle, connection, Renew(*KEYS[0][:2], token, 8))

    epochs: list[int] = []
    world.at(4.5, lambda: epochs.append(world.servers[FIRST].node.view.epochs[0]))
    world.at(7, world.when, lambda: world.counts["reclaims"] > 0, lambda: world.after(0.5, arrive))


def late_grant(world: World) -> None:
    """A client is granted a lock while it is stopped, another one after that; then comes a crash."""
    world.visit("c1", 4, lease=8, hold=2)
    world.visit("c2", 5, lease=2, hold=9)
    world.at(5.5, world.stop, "c2", 7)
    world.visit("c3", 7, lease=8, hold=20)
    world.at(9, world.crash, FIRST, 20)

    def back() -> None:
        world.clients["c2"].owners[0] = next(
            (name, 0) for name, s in world.servers.items() if 0 in s.able()
        )
        world.clients["c2"].go_on()

    world.at(9.2, world.stop, "c3", 5)
    world.at(12.4, world.stop, "c2", 10)
    world.at(9.5, world.when, lambda: any(0 in s.able() for s in world.servers.values()), back)
