"""How a server joins the cluster, and shows that it lives: its own entry in the store."""

from __future__ import annotations

import logging
import math
import random
from enum import Enum

from dflockd.cluster.backoff import Backoff
from dflockd.cluster.parameters import ClusterParameters
from dflockd.cluster.serving_leases import ServingLeases
from dflockd.cluster.transactions import Kind, Transaction
from dflockd.cluster.view import LEAVING, NODES, View
from dflockd.shards import Get, Outcome, Put, RevisionIs, ValueIs
from dflockd.shards.keys import SERVERS_MARK
from dflockd.shards.store import NO_LEASE

logger = logging.getLogger("dflockd.cluster")


class News(Enum):
    """What the answer to a sign of life says."""

    NOTHING = "nothing"
    ALIVE = "alive"
    """The entry is there: this server's serving lease is extended."""
    JOINED = "joined"
    """The same, for the first time in this life."""
    GONE = "gone"
    """The others take this server for dead."""
    REPLACED = "replaced"
    """The store has another cluster, or none, or what it had before: it was wiped or restored."""


class Membership:
    """One server's life in the cluster, and the next one when it was taken for dead.

    Attributes:
        condition: that the entry of this life is there. Answers under another one are of another life.
        lease: the lease of the store, by which the entry lives; 0 while there is none.
        wants_lease: whether it has to `enlist`, for it never did or was taken for dead.
        joined: whether the entry was found in this life.
        reason: by what it is known that the store was replaced.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        view: View,
        parameters: ClusterParameters,
        leases: ServingLeases,
    ) -> None:
        self.key = view.key(NODES, address)
        self.condition = ValueIs(self.key, b"")
        self.lease = 0
        self.wants_lease = True
        self.joined = False
        self.reason = ""
        self._beaten_at = 0
        """The revision of the last sign of life that is known to be in the store."""
        self._address = address
        self._parameters = parameters
        self._leases = leases
        self._cluster = ValueIs(view.secret, secret)
        self._gets = Get(self.key), Get(view.closed)
        self._came_late = False
        """Whether this process is none of those from before that the store was said to be replaced."""
        self._has_lived = False
        self._leaving = view.key(LEAVING, address)
        self._is_there = False
        self._is_taken = False
        self._beating = False
        self._next_beat = 0.0
        self._announcing = False
        chance = random.Random(address).random
        self._backoff = Backoff(chance)
        self._waits = Backoff(chance)
        """For an earlier process to be gone."""

    @property
    def in_touch(self) -> bool:
        """Whether the last sign of life was answered."""
        return not self._backoff.failing

    def found(self, secret: bytes) -> None:
        """Take in the secret of the cluster: no entry is written where it is another one."""
        self._cluster = ValueIs(self._cluster.key, secret)

    def hurry(self, now: float) -> None:
        """Retry now what was scheduled for later: something has changed."""
        if not self._beating and (self._backoff.failing or self._waits.failing):
            self._next_beat = min(self._next_beat, now)

    def enlist(self, incarnation: str, lease: int, now: float) -> None:
        """Begin a life: by a name that was never used, and with a new lease of the store."""
        self.condition = ValueIs(self.key, f"{SERVERS_MARK}{incarnation}".encode())
        self._beaten_at = 0
        self.lease = lease
        self.wants_lease = False
        self._next_beat = now

    def end(self) -> None:
        """End a life."""
        self.joined = self._is_there = self._announcing = False
        self.condition = ValueIs(self.key, b"")  # answers that are under way are of another life
        self.lease = 0
        self.wants_lease = True

    def give_up(self) -> None:
        """Begin no other life."""
        self.end()
        self.wants_lease = False
        self._next_beat = math.inf

    def next_deadline(self) -> float | None:
        """Return when `transaction` should next be asked for."""
        return None if self.wants_lease or self._beating else self._next_beat

    def due(self, now: float) -> Transaction | None:
        """Return the sign of life that is due, if one is."""
        if self.wants_lease or self._beating or now < self._next_beat:
            return None
        self._beating = True
        self._next_beat = now + self._parameters.serving_lease / 3
        put = Put(self.key, self.condition.value, self.lease)
        if self.joined or self._is_there:
            # A lease that is kept alive would not do: an etcd member that was cut off has been known
            # to confirm that (etcd-io/etcd, issue 15247).
            kind, mine = Kind.HEARTBEAT, self.condition
            return Transaction(kind, now, [mine, self._cluster], [*self._gets, put])
        absent = RevisionIs(self.key, 0)
        return Transaction(Kind.ENLIST, now, [absent, self._cluster], [*self._gets, put])

    def answered(self, transaction: Transaction, outcome: Outcome | None, now: float) -> News:
        """Take in how a sign of life ended; without an outcome nobody knows."""
        self._beating = False
        put = transaction.operations[-1]
        assert isinstance(put, Put)
        if put.lease != self.lease:
            return News.NOTHING  # of an earlier life
        if outcome is None:
            left = self._leases.until - now
            self._next_beat = self._backoff.failed(transaction.made, now, left)
            return News.NOTHING
        self._backoff.worked()
        there = outcome.records.get(self.key)
        if there is not None and there.value == put.value and there.revision < self._beaten_at:
            self.reason = f"{self.key} is older than it was"
            return News.REPLACED
        if outcome.succeeded:
            self._beaten_at = outcome.revision
            closed = outcome.records.get(self._gets[1].key)
            self._came_late = closed is not None and (self._came_late or not self._has_lived)
            self._has_lived = True
            if closed is not None and not self._came_late:
                self.reason = f"{closed.value.decode(errors='replace')} says so"
                return News.REPLACED
            return self._alive(transaction)
        if outcome.revision:  # else only the lease is known to have ended
            founded = outcome.records.get(self._cluster.key)
            if founded is None or founded.value != self._cluster.value:
                self.reason = f"{self._cluster.key} is not the one that it was"
                return News.REPLACED
        if transaction.kind is Kind.HEARTBEAT or there is None:
            return News.GONE  # the lease has ended before
        if (there.value, there.lease) == (put.value, put.lease):
            # It is there from an attempt whose answer was lost. No serving lease follows: the others
            # have seen nothing now, and reckon with the signs of life that they have seen.
            self._is_there = True
            self._next_beat = now
        else:
            # An earlier process's, until its lease ends; or somebody else advertises this address.
            is_servers = there.lease != NO_LEASE and there.value.startswith(SERVERS_MARK.encode())
            if not (is_servers or self._is_taken):
                logger.error(
                    "%s was not written by a server, and this server cannot join while it is there; "
                    "delete it: etcdctl del %s",
                    *(self.key, self.key),
                )
            elif not self._is_taken:
                logger.warning(
                    "another server advertises %s: waiting until it is gone, up to %d s if it has "
                    "ended; give each server an --advertise address of its own",
                    *(self._address, self._parameters.serving_lease),
                )
            self._is_taken = True
            self._next_beat = self._waits.failed(transaction.made, now)
        return News.NOTHING

    def _alive(self, transaction: Transaction) -> News:
        self._leases.extend(transaction.made)
        if self.joined:
            return News.ALIVE
        self.joined, self._is_taken = True, False
        self._waits.worked()
        logger.info("%s is in the cluster", self._address)
        return News.JOINED

    def announce(self, now: float) -> Transaction | None:
        """Return what tells the leader that this server leaves, unless it was told."""
        if self._announcing:
            return None
        self._announcing = True
        put = Put(self._leaving, self.condition.value, self.lease)
        return Transaction(Kind.ANNOUNCE, now, [self.condition], [put])

    def not_announced(self) -> None:
        """Take in that the leader may not have been told."""
        self._announcing = False
