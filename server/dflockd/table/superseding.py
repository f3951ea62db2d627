"""The newest wins: what an owner with an age does to older ones, and they to it.

Only requests with an age take part. An older one that asks or waits is refused. An older one that
holds the lock gets a message if it listens: when it releases, the next one has the lock as usual.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial

from dflockd.table.connections import Connections
from dflockd.table.issuer import TokenIssuer
from dflockd.table.limits import STEP, Limits
from dflockd.table.newest import Newest, NewestKeys, NewestRecord
from dflockd.table.queue import number_of
from dflockd.table.slots import Effect
from dflockd.table.state import Entry, Hold, Partition, Peer, Waiter
from dflockd.table.states import LISTENING
from dflockd.wire import Moved, Refusal, Space, Status, Superseded


class Superseding(Connections):
    """Whose age counts."""

    def __init__(self, limits: Limits, issuer: TokenIssuer, *, kept: bool = False) -> None:
        super().__init__(limits, issuer, kept=kept)
        self.newest = NewestKeys()

    def _contend(
        self,
        entry: Entry,
        age: int,
        label: bytes,
        resumed: Waiter | None,
        now: float,
        effects: list[Effect],
    ) -> Entry | Refusal:
        """Have somebody with an age ask for a lock: send it away, or those who are older.

        Args:
            entry: of the lock.
            age: of who asks.
            label: its label.
            resumed: the position that it takes up, if it does.
            now: the time.
            effects: what others are told.

        Returns:
            The entry of the lock, which may be another one now; or what to answer.
        """
        partition, space, key, limit = entry.partition, entry.space, entry.key, entry.limit
        newest = partition.newest.get(key) or self._newest_there(entry)
        if newest is not None and newest.age >= age:
            self.newest.asked(newest)
            if newest.age == age:
                return entry
            answer = Superseded(newest.age, newest.label)
            if resumed is not None:
                self._oust(resumed, entry, answer, effects)
                self._promote(entry, now, effects)
            self.counts.outdated += 1
            return self._turn_away(entry, answer)
        self._remember(partition, NewestRecord(key, age, label))
        answer = Superseded(age, label)
        if not self._oust_older(entry, answer, resumed, now, effects):
            self._later(partial(self._oust_more, entry), now)
        if not self._is_here(entry):
            return self._add(partition, space, key, limit, now)
        if entry.waiters is not None and entry.waiters.listener is not None:
            self._tell_listener(entry.waiters.listener, answer, effects)
        return entry

    def _oust_older(
        self,
        entry: Entry,
        answer: Superseded,
        resumed: Waiter | None,
        now: float,
        effects: list[Effect],
    ) -> bool:
        """Send away who waits and is older, or some of them; say whether that was all."""
        # Those who came first stand first, so that nobody as new is before them.
        first = list(itertools.islice(entry.aged or (), STEP))
        older = [w for w in first if w.age < answer.age and w is not resumed]
        older.sort(key=number_of)
        for waiter in older:
            self._oust(waiter, entry, answer, effects)
        if older and self._is_here(entry):
            self._promote(entry, now, effects)  # a slot may have been held for one of them
        return len(first) < STEP or not older

    def _oust_more(self, entry: Entry, now: float, effects: list[Effect]) -> bool:
        newest = entry.partition.newest.get(entry.key)
        if newest is None or not self._is_here(entry):
            return True
        answer = Superseded(newest.age, newest.label)
        return self._oust_older(entry, answer, None, now, effects)

    def _newest_there(self, entry: Entry) -> Newest | None:
        """Return the newest of those who hold a lock or wait for it, if the newest was forgotten."""
        best: Hold | Waiter | None = None
        most = 0
        # One alone holds a lock of which ages count, and who waits is as old as the newest was.
        items: list[Hold | Waiter] = list(itertools.islice(entry.holds.values(), STEP))
        items.extend(itertools.islice(entry.aged or (), STEP))
        for item in items:
            age = item.owner.age if item.owner is not None else 0
            if age > most:
                best, most = item, age
        if best is None:
            return None
        self._remember(entry.partition, NewestRecord(entry.key, most, best.label))
        return entry.partition.newest[entry.key]

    def _turn_away(self, entry: Entry, answer: Refusal) -> Refusal:
        """Return an answer to who wanted a slot of an entry that may be there for nobody else."""
        if not (entry.holds or entry.waiters) and self._is_here(entry):
            self._remove(entry)
        return answer

    def _outdated(self, space: int, key: bytes, age: int) -> Superseded | None:
        """Return what to tell somebody who has lost its position, if it has because it is older."""
        partition = self._locate(key)
        if not age or space != Space.LOCK or not isinstance(partition, Partition):
            return None
        newest = partition.newest.get(key)
        if newest is None or not age < newest.age:
            return None
        return Superseded(newest.age, newest.label)

    def _remember(self, partition: Partition, record: NewestRecord) -> None:
        changed = self.newest.note(partition, record)
        if self.changes is not None:
            self.changes += changed

    def remember(self, records: Iterable[NewestRecord]) -> None:
        """Take in what was kept of an earlier table."""
        for record in records:
            self._partition.issuer.fence = max(self._partition.issuer.fence, record.age)
            self._remember(self._partition, record)

    # Holders that listen.

    def listen(
        self, peer: Peer, key: bytes, token: bytes, now: float, effects: list[Effect]
    ) -> Refusal | None:
        """Tell who holds a lock that somebody newer wants it.

        Returns:
            What to answer; ``None`` if there is no answer yet.
        """
        partition = self._locate(key)
        if not isinstance(partition, Partition):
            return partition
        hold = self._find(partition, Space.LOCK, key, token)
        if hold is None:
            return Status.LEASE_EXPIRED
        if hold.owner is None or not hold.owner.age:
            return Status.ERROR
        newest = partition.newest.get(key)
        if newest is not None and newest.age > hold.owner.age:
            self.counts.asked_to_stop += 1
            return Superseded(newest.age, newest.label)
        queue = hold.entry.queue()
        if queue.listener is not None:
            # Its process has lost the connection on which it did so.
            self._answer_listener(queue.listener, Status.LEASE_EXPIRED, effects)
        waiter = Waiter(hold.entry, peer, -1, 0, now, two_phase=False, state=LISTENING)
        queue.listener = peer.waiting = waiter
        return None

    def _tell_listener(self, waiter: Waiter, answer: Superseded, effects: list[Effect]) -> None:
        self.counts.asked_to_stop += 1
        self._answer_listener(waiter, answer, effects)

    # With its shard.

    def _refer_listener(self, entry: Entry, reply: Refusal, effects: list[Effect]) -> None:
        """Send who listens to where the lock is now."""
        if entry.waiters is not None and entry.waiters.listener is not None:
            if isinstance(reply, Moved):
                reply = reply._replace(ticket=b"")
            self._answer_listener(entry.waiters.listener, reply, effects)
