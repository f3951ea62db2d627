"""What runs a `Node`: its transactions over a store, its timer and its watch, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import secrets
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from dflockd import clock
from dflockd.cluster.backoff import Backoff
from dflockd.cluster.node import Node
from dflockd.cluster.parameters import ClusterParameters
from dflockd.cluster.transactions import Kind, Transaction
from dflockd.shards import (
    LeaseGoneError,
    Outcome,
    Put,
    RevisionIs,
    Store,
    StoreError,
    StoreReplacedError,
    StoreUnreachableError,
    follow,
)
from dflockd.shards.keys import Keys
from dflockd.table import Effect

SECRET_SIZE = 32
"""Bytes of the secret that the tokens of a cluster are made with."""

CLOSING_PAUSE = 3.0
"""Seconds between two attempts to tell servers that start of locks of which the store does not know."""

MEASURE_PAUSE = 30.0
"""Seconds, about, from one look at how full the store is to the next."""

END_TIMEOUT = 1.0
"""Seconds, at most, in which the store takes note that this server ends; half of it to be closed."""

SIGNS_OF_LIFE = (Kind.ENLIST.value, Kind.HEARTBEAT.value)

logger = logging.getLogger("dflockd.cluster")


async def agree(store: Store, prefix: str, parameters: ClusterParameters) -> bytes:
    """Join a cluster, or found it: return its secret.

    Raises:
        ParametersError: it has other parameters.
        StoreError: the store did not answer, or refused; or somebody else has the prefix.
    """
    keys = Keys(prefix)
    meta, secret = keys.meta, keys.secret
    founded = secrets.token_bytes(SECRET_SIZE)
    outcome = await store.txn(
        [RevisionIs(key, 0) for key in (meta, secret, keys.library)],
        [Put(meta, parameters.dump()), Put(secret, founded)],
    )
    if outcome.succeeded:
        return founded
    if keys.library in outcome.records:
        raise StoreError(
            f"{keys.library} exists, so nodes of the library use this prefix: choose another one"
        )
    kept = {key: record.value for key, record in outcome.records.items()}
    if secret not in kept:
        raise StoreError(
            f"{secret} is missing: without it no lock of the cluster can be recognised"
        )
    if meta not in kept:
        raise StoreError(
            f"{meta} is missing: if all servers of the cluster have the settings of this one, write it "
            f"again: etcdctl put {meta} '{parameters.dump().decode()}'"
        )
    parameters.check(kept[meta])
    return kept[secret]


class Member:
    """A server of a cluster, at work.

    Args:
        node: what it decides.
        store: what it shares with the others; it is closed with this.
        carry_out: what to do with effects, and with peers whose connections must be closed.
        name: how people know the store.

    Attributes:
        over: set when the store was replaced, and no lock from before can be left: then this
            process must end, and the next one finds the store as it is.
    """

    def __init__(
        self,
        node: Node,
        store: Store,
        carry_out: Callable[[list[Effect], set[int]], None],
        *,
        name: str,
    ) -> None:
        self.node = node
        self._name = name
        self._store = store
        self._carry_out = carry_out
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._stepped = asyncio.Event()
        self._lapsed = True
        self._complaints: dict[str, type[StoreError]] = {}
        self._refused = False
        """Whether the last sign of life was answered, with no."""
        self._wants_lease = asyncio.Event()
        self._wanted_lease = True
        self._closes = False
        self.over = asyncio.Event()

    def start(self) -> None:
        """Begin; in a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._spawn(self._follow())
        self._spawn(self._live())
        self._spawn(self._measure())
        self._step()

    async def stop(self, timeout: float | None) -> bool:
        """Hand every shard over and leave the cluster; return whether all were handed over in time.

        Args:
            timeout: seconds for it; ``None`` is as long as it takes.
        """
        node = self.node
        if node.membership.lease:
            node.leave(clock.now(), timeout)
            self._step()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while node.membership.lease and not node.has_left:
                    self._stepped.clear()
                    await self._stepped.wait()
        has_left = not node.counts()
        tasks, self._tasks = self._tasks, set()
        if self._timer is not None:
            self._timer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        end = min(END_TIMEOUT, math.inf if timeout is None else timeout / 6)
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(end):
                if node.membership.lease and node.membership.in_touch:
                    # Without this the others would find out once it has ended.
                    await self._store.revoke_lease(node.membership.lease)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(end / 2):
                await self._store.close()
        return has_left

    # Inputs of the node.

    async def _follow(self) -> None:
        async with contextlib.aclosing(follow(self._store, self.node.view.prefix)) as found:
            try:
                async for news in found:
                    now = clock.now()
                    if isinstance(news, list):
                        self.node.changed(news, now)
                    else:
                        self.node.loaded(news, now)
                    self._step()
            except StoreReplacedError as exc:
                self._replaced(exc)

    async def _live(self) -> None:
        """Get a lease of the store, and keep it; another one each time that the node needs one."""
        backoff = Backoff(random.random)
        third = self.node.parameters.serving_lease / 3
        kept_until = 0.0
        while True:
            self._wants_lease.clear()
            made = clock.now()
            try:
                if await self._keep_lease():
                    kept_until = made + 3 * third
                pause = third
                backoff.worked()
            except StoreReplacedError as exc:
                self._replaced(exc)
                return
            except StoreError as exc:
                if not isinstance(exc, LeaseGoneError):  # else the node finds out by its heartbeat
                    self._complain("lease", exc)
                now = clock.now()
                pause = backoff.failed(made, now, kept_until - now) - now
            else:
                self._is_well("lease")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wants_lease.wait()

    async def _keep_lease(self) -> bool:
        """Keep the lease, or get one, and return whether there is one."""
        node = self.node
        if node.membership.wants_lease:
            lease = await self._store.grant_lease(node.parameters.serving_lease)
            node.enlist(uuid.uuid4().hex, lease.id, clock.now())
            self._step()
        elif node.membership.lease:
            await self._store.keep_alive(node.membership.lease)
        return bool(node.membership.lease)

    async def _measure(self) -> None:
        """Look now and then how full the store is."""
        while self.node.leases.over_at is None:
            with contextlib.suppress(StoreError):
                self.node.store_size = await self._store.size()
            await asyncio.sleep(MEASURE_PAUSE * random.uniform(0.75, 1.25))

    async def _send(self, transaction: Transaction) -> None:
        outcome: Outcome | None = None
        try:
            is_sign = transaction.kind.value in SIGNS_OF_LIFE
            timeout = self.node.parameters.serving_lease / 3 if is_sign else None
            outcome = await self._store.txn(
                transaction.compares, transaction.operations, timeout=timeout
            )
            self._is_well(transaction.kind.value)
        except LeaseGoneError:
            outcome = Outcome(False, 0, {})
        except StoreReplacedError as exc:
            self._replaced(exc)
        except StoreError as exc:
            self._complain(transaction.kind.value, exc)
        self.node.answered(transaction, outcome, clock.now())
        self._step()

    def _replaced(self, exc: StoreReplacedError) -> None:
        self.node.replaced(str(exc), clock.now())
        self._step()

    async def _close_store(self) -> None:
        """Tell servers that start on the store as it is now that locks may be held in spite of it.

        A new one finds there that nobody has served a shard yet, and would open it at once. It is told
        again and again: the store may be replaced once more.
        """
        node, store, lease = self.node, self._store, 0
        while True:
            # Each time: an answer to what was asked before may have come in meanwhile.
            store.begin_anew()
            try:
                lease = lease or (await store.grant_lease(math.ceil(node.parameters.grace))).id
                await store.txn((), node.closing(lease, clock.now()))
            except LeaseGoneError:
                lease = 0
            except StoreError as exc:
                self._complain("closing", exc)
            await asyncio.sleep(CLOSING_PAUSE)

    def _complain(self, what: str, exc: StoreError) -> None:
        """Say once what the store says, until that works again or it says something else."""
        if what in SIGNS_OF_LIFE and self.node.leases.over_at is None:
            self._refused = not isinstance(exc, StoreUnreachableError)
            self.node.trouble = str(exc)
        is_known = self._complaints.get(what) is type(exc)
        self._complaints[what] = type(exc)
        logger.log(logging.DEBUG if is_known else logging.WARNING, "%s: %s", what, exc)

    def _is_well(self, what: str) -> None:
        self._complaints.pop(what, None)
        if what in SIGNS_OF_LIFE:
            self.node.trouble = ""

    def _due(self) -> None:
        self._timer = None
        self.node.advance(clock.now())
        self._step()

    # Outputs.

    def _step(self) -> None:
        """Do what the node wants done."""
        effects, idle, transactions = self.node.output()
        if effects or idle:
            self._carry_out(effects, idle)
        for transaction in transactions:
            self._spawn(self._send(transaction))
        if self.node.leases.over_at is not None and not self._closes:
            self._closes = True
            self._spawn(self._close_store())
        if self.node.membership.wants_lease and not self._wanted_lease:
            self._wants_lease.set()
        self._wanted_lease = self.node.membership.wants_lease
        self._tell()
        if self._timer is not None:
            self._timer.cancel()
        now = clock.now()
        # It may be endless, which a timer cannot be.
        deadline = min(self.node.next_deadline(), now + self.node.parameters.serving_lease)
        if not self._lapsed:
            deadline = min(deadline, self.node.leases.until)
        if self.node.leases.over_at is not None:
            deadline = min(deadline, self.node.leases.over_at)
            if now >= self.node.leases.over_at:
                self.over.set()
                return
        self._timer = self._loop.call_later(max(0.0, deadline - now), self._due)
        self._stepped.set()

    def _tell(self) -> None:
        """Say so when locks are not granted any more, and when they are again."""
        lapsed = not self.node.may_serve(clock.now())
        if self.node.leases.over_at is not None:
            self._lapsed = True  # which has been said
        if lapsed and not self._lapsed:
            what = (
                "has refused what keeps this server alive" if self._refused else "has not answered"
            )
            logger.error(
                "%s %s for %d s: no lock is granted or renewed until it does: %s",
                *(
                    self._name,
                    what,
                    self.node.parameters.serving_lease,
                    self.node.trouble or "no error so far",
                ),
            )
        elif self._lapsed and not lapsed:
            logger.info("%s answers: locks are granted and renewed", self._name)
        self._lapsed = lapsed

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            # Half of a server would keep its shards and not know what happens to them. The others
            # know what to do about a dead one.
            logger.critical("stopping: unexpected error", exc_info=exc)
            logging.shutdown()
            os._exit(1)
