"""What can go wrong in a simulated world, for chance and for stories."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from dflockd.cluster.claims import EPOCH_SHIFT
from dflockd.cluster.transactions import Kind
from dflockd.shards import Delete, KeySpace
from dflockd.shards.errors import LeaseGoneError
from tests.dflockd.cluster.simulation.judge import BACK
from tests.dflockd.cluster.simulation.machines import PREFIX, Process
from tests.dflockd.cluster.simulation.server import ServerProcess

SOON = 4.0
"""Seconds after which a server has found out that the store refuses."""

PER_SECOND = 1.0
"""Transactions with which it may try a store that refuses."""


class Faults:
    """All that can be done to servers, clients, the store and the ways between them."""

    def stop(self, name: str, seconds: float) -> None:
        process = self.servers.get(name) or self.clients[name]
        process.stop(seconds)

    def hang(self, shard: int, seconds: float) -> None:
        """Have the server of a shard do nothing for so long, and not end."""
        name = self.etcd.record(shard).current
        if name:
            self.counts["hangs"] += 1
            self.stop(name, seconds)

    def crash(self, name: str, back_after: float = 1.0) -> None:
        self.counts["crashes"] += 1
        process = self.servers.get(name) or self.clients[name]
        self.log(process.name, "is killed")
        process.kill()
        self.after(back_after, self._start, name, process)

    def start(self, name: str) -> None:
        """Start what has been killed, sooner than it was to."""
        self._start(name, self.servers.get(name) or self.clients[name])

    def _start(self, name: str, former: Process) -> None:
        if (self.servers.get(name) or self.clients[name]) is not former:
            return
        if isinstance(former, ServerProcess) and self.time < self._closed_until:
            self.at(self._closed_until, self._start, name, former)
        elif isinstance(former, ServerProcess):
            if self._is_replaced and not self.etcd.has_floor:
                # Nobody has noticed, for none was left: then the manual says how long to wait.
                self._is_replaced = False
                self.wall += 64 << EPOCH_SHIFT
            process = ServerProcess(self, name, former.clock, next(self._lives))
            self.servers[name] = process
            self.log(process.name, "starts")
            if self.rules.stops:
                self.after(BACK, self._judge_return, self.time)
        else:
            self.clients[name] = self._client(name)

    def end_server(self, process: ServerProcess) -> None:
        """A server that was drained ends."""
        if process.alive:
            left = process.node.has_left
            self.counts["clean ends" if left else "ends that were not clean"] += 1
            self.log(process.name, "ends")
            lease = process.node.membership.lease
            process.kill()
            self.after(self.delay(), self.revoke, lease)
            away = self.random.uniform(0.5, 4)
            if self.rules.stops:
                away = self.random.choice((0.1, away / 2, 3.0))
                self._disturbed_at = self.time
                if not left:
                    raise self.violation(f"{process.name} has not handed everything over in time")
            self.after(away, self._start, process.address, process)

    def end_for_good(self, process: ServerProcess) -> None:
        """A server whose store was replaced ends, and is started again."""
        if process.alive:
            self.log(process.name, "ends, for the store was replaced")
            process.kill()
            self.after(self.random.uniform(0.1, 2), self._start, process.address, process)

    def end_at_once(self, name: str, back_after: float = 1.0) -> None:
        """Have a server end without handing anything over, and revoke its lease."""
        self.counts["ends at once"] += 1
        process = self.servers[name]
        self.log(process.name, "ends at once")
        process.kill()
        self.revoke(process.node.membership.lease)
        self.after(back_after, self._start, name, process)

    def replace(self, shard: int, by: str, cut: float = 10.0) -> None:
        """Have a server replaced that is cut off from the store, and may serve on for a while."""
        former = self.etcd.record(shard).current
        if former and former != by:
            self.cut_store([former], cut)
            self.move(shard, by)
            self.take_for_dead(former)

    def drain(self, name: str) -> None:
        self._disturbed_at = self.time
        process = self.servers[name]
        process.receive(process.leave)

    def revoke(self, lease: int) -> None:
        try:
            self.etcd.space.revoke(lease)
        except LeaseGoneError:
            return
        self.etcd.changed()

    def take_for_dead(self, name: str) -> None:
        """End a server's lease before its time."""
        self.counts["early ends of leases"] += 1
        self.log(name, "its lease ends early")
        self.revoke(self.servers[name].node.membership.lease)

    def delete_entry(self, name: str) -> None:
        """Delete a server's entry by hand."""
        self.counts["entries deleted"] += 1
        self.log(name, "its entry is deleted")
        self.etcd.space.txn([], [Delete(f"{PREFIX}/nodes/{name}")])
        self.etcd.changed()

    def delete(self, key: str) -> None:
        """Delete a key by hand."""
        self.counts["keys deleted"] += 1
        self.log("etcd", "%s is deleted", key)
        self.etcd.space.txn([], [Delete(key)])
        self.etcd.changed()

    def cut_store(self, names: Iterable[str], seconds: float) -> None:
        names = set(names)
        self.counts["cuts from the store"] += 1
        self.log("etcd", "is cut off from %s for %.1f s", sorted(names), seconds)
        self.etcd.cut |= names
        self.after(seconds, self.etcd.cut.difference_update, names)

    def cut(self, client: str, server: str, seconds: float) -> None:
        pair = frozenset((client, server))
        self._cut.add(pair)
        self.after(seconds, self._cut.discard, pair)

    def stop_store(self, seconds: float) -> None:
        self.counts["store stopped"] += 1
        self.log("etcd", "is away for %.1f s", seconds)
        self.etcd.is_up = False
        self.after(seconds, self._start_store)

    def _start_store(self) -> None:
        self.etcd.is_up = True
        for watch in self.etcd.watches:
            watch.cut = True

    def fill_store(self, seconds: float) -> None:
        """Have the store take nothing new for some time."""
        self.counts["store full"] += 1
        self.log("etcd", "is full for %.1f s", seconds)
        self.etcd.is_full = True
        self.after(seconds, self._empty_store, self.time)

    def _empty_store(self, since: float) -> None:
        self.etcd.is_full = False
        for who in {who for _, who in self.etcd.refused}:
            # Who was stopped finds it out once he goes on.
            knows = max(since, self.went_on.get(who, 0.0)) + SOON
            number = sum(time > knows for time, by in self.etcd.refused if by == who)
            if number > PER_SECOND * max(0.0, self.time - knows) + 2:
                raise self.violation(f"{who} asked a full store {number} times")

    def wipe_store(self, seconds: float, revision: int = 1) -> None:
        """Have the store away for some time, and empty then."""
        self.counts["wipes"] += 1
        space = KeySpace()
        space.revision = revision
        self._replace_store(seconds, space)

    def start_at_once(self, name: str) -> None:
        """Start a server although the store was replaced: against the manual."""
        self._closed_until = 0.0
        self.start(name)

    def restore_store(self, seconds: float) -> None:
        """Have the store away for some time, and in an earlier state then."""
        if self.etcd.copies and not self.calm:
            self.counts["restores"] += 1
            self._replace_store(seconds, copy.deepcopy(self.random.choice(self.etcd.copies)))

    def _replace_store(self, seconds: float, space: KeySpace) -> None:
        self.log("etcd", "is replaced, by one at revision %d", space.revision)
        # For so long nobody starts a server: the manual says so.
        self._closed_until = self.time + seconds + self.parameters.grace * 1.03
        self.stop_store(seconds)
        self.etcd.replace(space)
        self._is_replaced = True
        self.etcd.copies.clear()

    def interrupt(self, name: str) -> None:
        process = self.servers[name]
        self.counts["watches interrupted"] += 1
        process.receive(process.lose_watch, self.random.uniform(0, 1))

    def hold_up(self, kind: Kind, seconds: float) -> None:
        """Have the next transaction of a kind take so long that nobody waits for it any more."""
        self.etcd.held_up[kind] = seconds

    def lose_answer(self, name: str, kind: Kind) -> None:
        """Have a server's next transaction of a kind carried out, and its answer lost."""
        self.etcd.unanswered[kind] = name

    def blind(self, name: str, seconds: float) -> None:
        """Have a server hear nothing from the store, while its transactions go through."""
        process = self.servers[name]
        self.counts["watches silent"] += 1
        self.log(process.name, "hears nothing for %.1f s", seconds)
        process.receive(process.lose_watch, seconds)

    def lose_keep_alives(self, name: str, seconds: float) -> None:
        self.counts["keep-alives lost"] += 1
        self.etcd.no_keep_alives.add(name)
        self.after(seconds, self.etcd.no_keep_alives.discard, name)

    def move(self, shard: int, server: str) -> None:
        self.counts["moves"] += 1
        self.log("etcd", "shard %d is to be at %s", shard, server)
        self.etcd.edit(shard, lambda record: record._replace(target=server))

    def pin(self, shard: int, *, pinned: bool = True) -> None:
        self.etcd.edit(
            shard, lambda r: r.with_flag("pinned") if pinned else r.without_flag("pinned")
        )
