"""What runs a `Node`: its calls over a store, its timer and its watch, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from dflockd.cluster.calls import RETRY, Call
from dflockd.cluster.node import Node
from dflockd.cluster.terms import Terms
from dflockd.shards import (
    LeaseGoneError,
    Outcome,
    Put,
    RevisionIs,
    Store,
    StoreError,
    follow,
)
from dflockd.table import Effect

SECRET = 32
"""Bytes of the secret that the tokens of a cluster are made with."""

logger = logging.getLogger("dflockd.cluster")


async def agree(store: Store, prefix: str, terms: Terms) -> bytes:
    """Join a cluster, or found it: return its secret.

    Raises:
        TermsError: it has other terms.
        StoreError: the store did not answer, or refused.
    """
    meta, secret = f"{prefix.rstrip('/')}/meta", f"{prefix.rstrip('/')}.secret"
    founded = secrets.token_bytes(SECRET)
    outcome = await store.txn(
        [RevisionIs(meta, 0), RevisionIs(secret, 0)],
        [Put(meta, terms.dump()), Put(secret, founded)],
    )
    if outcome.succeeded:
        return founded
    kept = {key: record.value for key, record in outcome.records.items()}
    terms.check(kept.get(meta, b""))
    if secret not in kept:
        raise StoreError(
            f"{secret} is missing: without it no lock of the cluster can be recognised"
        )
    return kept[secret]


class Member:
    """A server of a cluster, at work.

    Args:
        node: what it decides.
        store: what it shares with the others; it is closed with this.
        carry_out: what to do with effects, and with peers whose connections are to be closed.
        name: how people know the store.
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
        self._has_complained = False

    def start(self) -> None:
        """Begin; in a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._spawn(self._follow())
        self._spawn(self._live())
        self._step()

    def is_serving(self) -> bool:
        """Whether locks are granted: whether the store has answered lately."""
        return self.node.may_serve(time.monotonic())

    async def stop(self, timeout: float | None) -> bool:
        """Hand every shard over and leave the cluster; return whether all were handed over in time.

        Args:
            timeout: seconds for it; ``None`` is as long as it takes.
        """
        node = self.node
        if node.membership.lease:
            node.leave(time.monotonic(), timeout)
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
        if node.membership.lease:
            # Without this the others would find out once it has ended.
            with contextlib.suppress(StoreError):
                await self._store.revoke_lease(node.membership.lease)
        await self._store.close()
        return has_left

    # Inputs of the node.

    async def _follow(self) -> None:
        async with contextlib.aclosing(follow(self._store, self.node.view.prefix)) as found:
            async for news in found:
                now = time.monotonic()
                if isinstance(news, list):
                    self.node.changed(news, now)
                else:
                    self.node.loaded(news, now)
                self._step()

    async def _live(self) -> None:
        """Get a lease of the store, and keep it; another one each time that the node needs one."""
        node = self.node
        while True:
            try:
                if node.membership.wants_lease:
                    lease = await self._store.grant_lease(node.terms.promise)
                    node.enlist(uuid.uuid4().hex, lease.id, time.monotonic())
                    self._step()
                elif node.membership.lease:
                    await self._store.keep_alive(node.membership.lease)
                await asyncio.sleep(node.terms.promise / 3)
            except LeaseGoneError:
                # The node finds out by itself: its next heartbeat fails.
                await asyncio.sleep(RETRY)
            except StoreError as exc:
                self._complain("lease", exc)
                await asyncio.sleep(RETRY)

    async def _send(self, call: Call) -> None:
        outcome: Outcome | None = None
        try:
            outcome = await self._store.txn(call.compares, call.operations)
            self._has_complained = False
        except LeaseGoneError:
            outcome = Outcome(False, 0, {})
        except StoreError as exc:
            self._complain(call.kind.value, exc)
        self.node.answered(call, outcome, time.monotonic())
        self._step()

    def _complain(self, what: str, exc: StoreError) -> None:
        # Once, until the store answers again: each call fails while it is away.
        logger.log(logging.DEBUG if self._has_complained else logging.WARNING, "%s: %s", what, exc)
        self._has_complained = True

    def _due(self) -> None:
        self._timer = None
        self.node.advance(time.monotonic())
        self._step()

    # Outputs.

    def _step(self) -> None:
        """Do what the node wants done."""
        effects, idle, calls = self.node.output()
        if effects or idle:
            self._carry_out(effects, idle)
        for call in calls:
            self._spawn(self._send(call))
        self._tell()
        if self._timer is not None:
            self._timer.cancel()
        now = time.monotonic()
        # It may be endless, which a timer cannot be.
        deadline = min(self.node.next_deadline(), now + self.node.terms.promise)
        if not self._lapsed:
            deadline = min(deadline, self.node.leases.until)
        self._timer = self._loop.call_later(max(0.0, deadline - now), self._due)
        self._stepped.set()

    def _tell(self) -> None:
        """Say so when locks are not granted any more, and when they are again."""
        lapsed = not self.is_serving()
        if lapsed and not self._lapsed:
            logger.error(
                "%s has not answered for %d s: no lock is granted or renewed until it does",
                *(self._name, self.node.terms.promise),
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
            # Half of a server would keep its shards and not know what becomes of them. The others
            # know what to do about one that is dead.
            logger.critical("ending: unexpected error", exc_info=exc)
            logging.shutdown()
            os._exit(1)
