"""Histories in which one rule or another makes the difference: what chance seldom comes upon."""

from __future__ import annotations

from collections.abc import Callable

from tests.dflockd.cluster.mishaps import (
    FIRST,
    SECOND,
    THIRD,
    back_unseen,
    back_without_an_answer,
    chained,
    claimed_twice,
    confirmed_for_an_earlier_life,
    cut_off,
    deposed_in_its_promise,
    entry_deleted,
    fast_and_slow,
    handed_over_and_deleted,
    handed_over_of_old,
    killed_while_it_leaves,
    late_grant,
    late_release,
    lost_with_the_answer,
    moved_and_deleted,
    overtaken_release,
    record_deleted,
    renewed_at_the_end,
    restart,
    second_life_unseen,
    signs_missed,
    started_after_it_all,
    stray_renewal,
    tidied_late,
)
from tests.dflockd.cluster.simulation import KEYS, Client, Life, World


def waits_where_nobody_comes(world: World) -> None:
    """A client waits at a server that is cut off, while its shard is served by another."""
    world.at(6, world.cut_store, [FIRST], 29)
    world.visit("c1", 5, lease=8, hold=3)
    world.visit("c2", 6.5, lease=8, hold=3, timeout=60)
    world.at(6.6, world.stop, "c1", 30)


def wiped(world: World) -> None:
    """The store is wiped while a lock is held, and a server starts on it once another has noticed."""
    world.at(4, world.crash, THIRD, 40)
    world.visit("c1", 5, lease=8, hold=20)
    world.at(7, world.wipe_store, 0.0)
    world.at(7, world.when, lambda: bool(world.etcd.closed_by), world.start_at_once, THIRD)
    world.visit("c2", 8, lease=3, hold=3, via=THIRD)


def wiped_and_busy(world: World) -> None:
    """The store is wiped, and others write so much to it that its revision does not show it."""
    world.visit("c1", 5, lease=8, hold=20)
    world.at(7, world.wipe_store, 0.0, 1_000_000)
    world.visit("c2", 7.5, lease=3, hold=3)


def restored(world: World) -> None:
    """The store is set back to before a shard was moved."""
    world.at(4, world.etcd.copy)
    world.visit("c1", 5, lease=8, hold=20)
    world.at(6, world.move, 0, SECOND)
    world.at(8, world.restore_store, 0.5)


def restored_soon(world: World) -> None:
    """The store is set back by some signs of life alone."""
    world.at(6, world.etcd.copy)
    world.visit("c1", 5, lease=8, hold=20)
    world.at(6.9, world.restore_store, 0.5)


def owner_hangs(world: World) -> None:
    """A server says nothing for half a minute. Nobody has a lock of it, and everybody a connection."""
    world.at(5, world.stop, FIRST, 30)
    for name, timeout, is_granted in (
        ("c1", 0, False),
        ("c2", 2.3, False),
        ("c3", 3, False),
        ("c4", 26, True),
        ("c5", 26.3, True),
    ):
        _expect(world, name, 5.2, timeout, is_granted, knows_it=True)


def moved_to_one_that_hangs(world: World) -> None:
    """A server sends clients on to one that says nothing."""
    world.at(4, world.move, 0, SECOND)
    world.at(5, world.stop, SECOND, 10)
    _expect(world, "c1", 5.2, 3, False)
    _expect(world, "c2", 5.2, 2.3, False)


def hangs_while_somebody_waits(world: World) -> None:
    """A server hangs after it has put somebody into the queue; the holder goes meanwhile."""
    world.visit("c1", 4, lease=8, hold=3)
    _expect(world, "c2", 4.5, 28, True)
    _expect(world, "c3", 4.5, 28.3, True)
    world.at(6, world.stop, FIRST, 28)


def _expect(
    world: World, name: str, at: float, timeout: float, is_granted: bool, *, knows_it: bool = False
) -> None:
    """Have a client take the first lock for a moment, and judge whether it should have got it.

    Who knows the server has had the lock before, and does not begin with `hello`.
    """

    def errand(client: Client) -> Life:
        client.remember(0, FIRST)
        if knows_it:
            assert (yield from client.use(client.acquire, KEYS[0], 8, 8, 0.1))
            yield from client._sleep(at - world.time)
        granted = yield from client.use(client.acquire, KEYS[0], timeout, 8, 0.1)
        if granted != is_granted:
            raise world.violation(f"{name} was {'' if granted else 'not '}granted the lock")

    world.at(3 if knows_it else at, world.come, name, errand)


STORIES: dict[Callable[[World], None], list[str]] = {
    cut_off: ["grants without a serving lease", "renewals without a serving lease"],
    entry_deleted: ["heartbeat whatever the entry"],
    handed_over_and_deleted: ["snapshot deleted by hand"],
    record_deleted: ["epochs forgotten with the record"],
    moved_and_deleted: ["epochs forgotten with the record"],
    back_unseen: ["claim while the former server lives"],
    second_life_unseen: ["signs of life not waited for"],
    back_without_an_answer: ["serving lease that nobody sees"],
    confirmed_for_an_earlier_life: ["confirmed in an earlier life"],
    chained: ["those before the former server forgotten"],
    started_after_it_all: ["what was before the start forgotten"],
    signs_missed: ["signs of life that were missed"],
    lost_with_the_answer: ["snapshot deleted in the claim"],
    tidied_late: ["deleted whatever was handed over"],
    claimed_twice: ["those before the former server forgotten"],
    deposed_in_its_promise: ["reclaim while the former server serves"],
    renewed_at_the_end: ["grace without the serving lease"],
    handed_over_of_old: ["snapshot of any epoch"],
    killed_while_it_leaves: ["snapshot dropped"],
    fast_and_slow: ["leases not stretched"],
    late_release: ["thaw without a newer revision"],
    overtaken_release: ["release whatever the record"],
    restart: ["resumed by address"],
    stray_renewal: ["lower fence wins"],
    wiped: ["opened in a store that was wiped"],
    wiped_and_busy: ["joined whatever the cluster"],
    late_grant: ["grant confirmed by a renewal"],
}
"""The rules without which each of them ends badly."""

HANGS: dict[Callable[[World], None], list[str]] = {
    owner_hangs: [
        "silence taken for an answer",
        "cut off though nobody has answered",
        "nobody looks at a silent server",
    ],
    moved_to_one_that_hangs: [],  # who comes there is told nothing at `hello` already
    hangs_while_somebody_waits: ["nobody looks at a silent server"],
}
"""The same, where clients wait as the library does."""
