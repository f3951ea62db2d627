"""What is seen of a simulated server from outside, and judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from dflockd.shards import get_shard_id
from dflockd.table.sharded import RESUME_TIMEOUT
from dflockd.table.state import Partition, Waiter
from dflockd.table.states import EXPECTED, PASSED
from dflockd.wire import Acquire, Enqueue
from tests.dflockd.cluster.simulation.machines import Connection, Key, Process


def _entries(group: Partition) -> Iterable[Any]:
    return (entry for space in group.spaces for entry in space.values())


class Observed(Process):
    """A server that is watched: what it grants to whom, and in what order."""

    def _observe(self) -> None:
        """Count what happens, and remember who was in a queue before whom."""
        world, table, node = self.world, self.table, self.node

        def wrap(owner: object, name: str, note: Callable[..., None]) -> None:
            inner = getattr(owner, name)

            def noted(*args: Any, **kwargs: Any) -> Any:
                result = inner(*args, **kwargs)
                note(result, *args, **kwargs)
                return result

            vars(owner)[name] = noted

        def opened(_: object, shard: int, fence: int, **until: float | None) -> None:
            graced = until.get("recovers_until") is not None
            world.counts["claims with grace" if graced else "claims without grace"] += 1
            world.log(self.name, "opens shard %d, epoch %d%s", *(shard, (fence >> 40) % 10_000),
                      ", with grace" if graced else "")  # fmt: skip
            if graced:
                world.forget_ages(shard)

        def loaded(_: object, shard: int, snapshot: Any, *args: float) -> None:
            world.counts["snapshots"] += 1
            (now,) = args
            for place in snapshot.waiters:
                until = place.reservation.until if place.reservation else now + RESUME_TIMEOUT
                self.kept[place.ticket] = shard, until
            world.log(self.name, "takes in %d holds, %d places of shard %d",
                      len(snapshot.holds), len(snapshot.waiters), shard)  # fmt: skip

        def froze(_: object, shard: int, *args: object) -> None:
            world.counts["freezes"] += 1
            world.log(self.name, "freezes shard %d", shard)
            for entry in _entries(table.partitions[shard]):
                waiters = list(entry.waiters or ())
                waiters += [hold.waiter for hold in entry.holds.values() if hold.waiter]
                for waiter in waiters:
                    if waiter.ticket and waiter in self.tickets:
                        world.places[waiter.ticket] = self.tickets[waiter]

        def thawed(_: object, shard: int, *args: object) -> None:
            world.counts["thaws"] += 1
            world.log(self.name, "thaws shard %d", shard)

        def dropped(_: object, shard: int, *args: object) -> None:
            world.log(self.name, "drops shard %d", shard)
            for name in [name for name, (where, _) in self.kept.items() if where == shard]:
                del self.kept[name]

        def gone(_: object, *args: object) -> None:
            world.counts["taken for dead"] += 1
            world.log(self.name, "learns that it was taken for dead")

        for name, note in (("open", opened), ("load", loaded), ("freeze", froze),
                           ("thaw", thawed), ("drop", dropped)):  # fmt: skip
            wrap(table, name, note)
        wrap(node, "_gone", gone)

    def _note_place(
        self, connection: Connection, request: Acquire | Enqueue, place: bytes, now: float
    ) -> None:
        peer = connection.peer
        assert peer is not None
        connection.key = Key(request.space, request.key, request.limit)
        waiter = peer.waiting or peer.enqueued.get((request.space, request.key))
        number = next(self.world.numbers)
        if place:
            number = self.world.places[place]
            self.world.counts["places resumed"] += 1
        connection.ticket = number
        self.world.turns.groups[number] = connection.group
        if waiter is not None:
            self.world.log(self.name, "%s is number %d for %s",
                           connection.client.name, number, request.key)  # fmt: skip
            self.tickets[waiter] = number
            self.came[waiter] = now
            if waiter.turn is not None:  # it can be taken up from the start
                self.world.places[waiter.ticket] = number

    def _note_kept(self, connection: Connection, place: bytes) -> None:
        self.world.counts["places kept"] += 1
        self.world.places[place] = connection.ticket
        for shard, group in self.table.partitions.items():
            waiter = group.reserved.get(place)
            if waiter is not None and waiter.reservation is not None:
                self.kept[place] = shard, waiter.reservation.until

    def _note_told(self, connection: Connection, ticket: bytes) -> None:
        """From now on the position is there for whoever has the ticket, while its connection is."""
        self.world.counts["told of their turns"] += 1
        connection.told.add(ticket)
        for shard, group in self.table.partitions.items():
            waiter = group.reserved.get(ticket)
            if waiter is not None:
                self.kept[ticket] = shard, math.inf
                self.world.places[ticket] = self.tickets.get(waiter, connection.ticket)

    def _note_return(self, connection: Connection, now: float, was_passed: bool) -> None:
        """Somebody may wait again for a place whose shard has been elsewhere meanwhile."""
        waiter = connection.peer.waiting if connection.peer is not None else None
        for ticket in connection.told:
            self.kept.pop(ticket, None)  # until it is told again
        if waiter is not None and was_passed:
            self.came[waiter] = math.nextafter(now, math.inf)  # what it let pass was given before
        if waiter is not None and waiter not in self.tickets:
            self.tickets[waiter] = self.world.places[waiter.ticket]

    def _judge_order(self, connection: Connection, token: bytes) -> None:
        key, peer = connection.key, connection.peer
        assert key is not None
        assert peer is not None
        (given,) = (hold.since for hold in peer.holds if hold.token == token)
        shard = get_shard_id(key.name, self.world.parameters.num_shards)
        group = self.table.partitions.get(shard)
        entry = group.spaces[key.space].get(key.name) if group is not None else None
        present = []
        for waiter in (entry.waiters or ()) if entry is not None else ():
            # Who wants a turn is passed over while its process does not ask.
            is_served = waiter.state in (EXPECTED, PASSED) or waiter.process is not None
            if is_served or self.came.get(waiter, given) > given:
                continue  # there is a slot for each, or nobody was there when it was given
            ticket = self._number(waiter)
            present.append(ticket)
            if (
                self.world.turns.are_of_one(ticket, connection.ticket)
                and ticket < connection.ticket
            ):
                raise self.world.violation(
                    f"{self.name}: {connection.client.name}, number {connection.ticket}, was granted "
                    f"{key.name.decode()} before number {ticket}"
                )

        if connection is not self._taker:
            self.world.turns.judge(key, connection.ticket, present)
            self.world.turns.note(key, connection.ticket)

    def _number(self, waiter: Waiter) -> float:
        return self.tickets.get(waiter) or self.world.places.get(waiter.ticket, math.inf)

    def _judge_turns(self) -> None:
        """Look for whom slots were set aside, and who was let pass: that is a turn, too."""
        turns = self.world.turns
        for group in self.table.partitions.values():
            for entry in _entries(group):
                waiters = list(entry.waiters or ())
                key = Key(entry.space, entry.key, entry.limit)
                now = [w for w in waiters if w.state in (EXPECTED, PASSED)]
                ready = [w for w in waiters if w not in now and w.process is None]
                present = [self._number(w) for w in ready]
                for waiter in now:
                    number = self._number(waiter)
                    if number not in turns.missed and waiter.state == EXPECTED:
                        turns.judge(key, number, present)
                turns.set_aside(key, [self._number(waiter) for waiter in now])

    def _note_age(self, connection: Connection) -> None:
        """Somebody has asked: from now on those who are older get nothing."""
        key = connection.key
        newest, _, _ = self.world.newest.get(key, (0, "", 0.0))
        if connection.age > newest:
            self.world.newest[key] = connection.age, self.name, self.clock.read()

    def _judge_age(self, connection: Connection, token: bytes) -> None:
        key, peer = connection.key, connection.peer
        if peer is None or key is None or not connection.age:
            return
        (given,) = (hold.since for hold in peer.holds if hold.token == token)
        newest, server, asked = self.world.newest.get(key, (0, "", 0.0))
        if server == self.name and given <= asked:
            return  # it was its own before that
        if connection.age < newest:
            raise self.world.violation(
                f"{self.name}: {connection.client.name}, of age {connection.age}, was granted "
                f"{key.name.decode()} after {newest} had asked"
            )

    @property
    def keeps_up(self) -> bool:
        """Whether it knows about all that the store has."""
        latest = self.world.etcd.space.revision
        return self.node.membership.joined and self.continuity.revision >= latest - 1

    def able(self) -> set[int]:
        """Return the shards that it might grant or renew locks of, if it were asked now."""
        now = self.clock.read()
        if not (self.alive and self.node.may_serve(now)):
            return set()
        return {shard for shard in self.table.partitions if self._is_open(shard, now)}

    def grants(self) -> set[int]:
        """Return the shards that it grants locks of."""
        now, groups = self.clock.read(), self.table.partitions
        return {shard for shard in self.able() if (groups[shard].recovers_until or 0) <= now}

    def _is_open(self, shard: int, now: float) -> bool:
        key = b"shard#%d/" % shard
        return isinstance(self.table.serving(key, now), Partition)
