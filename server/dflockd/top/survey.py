"""What servers hold, asked of all of them at once and again and again."""

from __future__ import annotations

import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, Generic, TypeVar

from dflockd import clock
from dflockd.address import Seeds, Servers
from dflockd.admin import Inquiry, describe_pause, is_note
from dflockd.client.operations import ShardReport
from dflockd.errors import DflockdError, MovedError, RecoveringError
from dflockd.ranking import SORTS, Ranked
from dflockd.rates import describe_rate, keeps_waiting

DEPTH = 100
"""Keys of each server that are looked at closely: more than fit a screen."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """A key, as its server described it; times in seconds.

    Attributes:
        limit: how many may hold it.
        holders: how many hold it.
        used: how many slots these take, if that is not one each; else 0.
        label: the label of the longest holder.
        held_s: for how long, ``inf`` while that is not known.
        lease_s: its lease when it was last granted or renewed; 0 while that is not known.
        left_s: what was left of it.
        owner: which run holds it, where it has said so.
        attempt: which of its attempts.
        newer: the label of a newer task that has come, where the newest wins.
        group: to which group it belongs, if to one.
        rate: when another run may begin, in a few words, where that is not at any time.
        paused: by whom it is paused and why, in a few words, where it is.
        oldest_s: for how long the first in the queue has waited.
        semaphore: whether it is that of published clients, beside the lock of that name.
    """

    server: str
    key: str
    limit: int
    holders: int
    waiters: int
    label: str = ""
    held_s: float = inf
    lease_s: float = 0.0
    left_s: float = 0.0
    owner: str = ""
    attempt: int = 0
    rate: str = ""
    newer: str = ""
    group: str = ""
    paused: str = ""
    oldest_s: float = 0.0
    used: int = 0
    semaphore: bool = False

    @property
    def ranked(self) -> Ranked:
        """What counts for its place among others."""
        return Ranked(self.key, self.semaphore, self.waiters, self.held_s, self.oldest_s)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Somebody in a queue, as the server described it; times in seconds.

    Attributes:
        position: the number of the waiter in the queue, from 1 to `waiters`.
        label: the label of the waiter.
        holder: the label of the longest holder, with `held_s`; empty while nobody holds the key.
        pace_s: from a grant of the key to the next, of late; ``None`` before the first.
        group: the group of the waiter, if it has one.
        rate: when the next run may begin, in a few words, where nobody may now.
        paused: by whom the key is paused and why, in a few words, where it is.
    """

    server: str
    key: str
    position: int
    waiters: int
    label: str
    waited_s: float
    holder: str = ""
    held_s: float = 0.0
    pace_s: float | None = None
    group: str = ""
    rate: str = ""
    paused: str = ""


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What one server said, or why it did not.

    Attributes:
        asked_at: the time, by `clock.now`.
        rows: the first keys in the order that was asked for.
        keys: how many it has.
        waiters: how many wait for those that it lists.
        error: why the server could not be asked, in one line; the rest is empty then.
        waiting: the waiters, longest first, if that was wanted.
        matched: how many there are of what was asked for; -1 where all was.
        circles: the deadlocks that the server has seen, each in words.
        status: whether it grants locks; see `LockTable.status`.
    """

    server: str
    asked_at: float
    rows: Sequence[Row] = ()
    keys: int = 0
    waiters: int = 0
    connections: int = 0
    error: str = ""
    waiting: Sequence[Waiting] = ()
    matched: int = -1
    circles: Sequence[str] = ()
    status: str = "serving"


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """How many shards each server of a cluster has; `unserved` have none at the moment."""

    servers: Mapping[str, int]
    unserved: int = 0
    error: str = ""


def in_order(rows: Iterable[Row], sort: str) -> list[Row]:
    """Return keys in one of the orders of `SORTS`."""
    return sorted(rows, key=lambda row: SORTS[sort](row.ranked))


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: for which of them, in what order.

    Attributes:
        sort: one of `SORTS`.
        text: only keys, holders and waiters that contain it; empty for all.
        waiters: for waiters, not keys.
        notes: also for keys of notes; see `dflockd.admin.is_note`.
    """

    sort: str = "waiters"
    text: str = ""
    waiters: bool = False
    notes: bool = False


def ask(inquiry: Inquiry, question: Callable[[], Question], depth: int = DEPTH) -> ServerReport:
    """Ask one server; of the keys the first few are looked at closely."""
    now, asked = clock.now(), question()
    try:
        stats = inquiry.stats()
        listed = [
            row for row in _listed(inquiry.server, stats) if asked.notes or not is_note(row.key)
        ]
        rows: Sequence[Row] = listed
        waiting, matched = [], -1
        if asked.waiters or asked.text or asked.sort == "wait":
            wants_waiters = asked.waiters or not asked.text
            found = inquiry.find(asked.text, waiters=wants_waiters, notes=asked.notes)
            matched = found["matched"] if asked.waiters or asked.text else -1
            if asked.waiters:
                rows, waiting = [], [_waiting(inquiry.server, row) for row in found["found"]]
            else:
                rows = _of_found(inquiry.server, found["found"], [] if asked.text else listed)
        rows = in_order(rows, asked.sort)
        close = (_looked_at(inquiry, row) for row in rows[:depth])
        return ServerReport(
            inquiry.server,
            now,
            [*(row for row in close if row is not None), *rows[depth:]],
            len(listed) + stats.get("omitted", 0),
            sum(row.waiters for row in listed),
            stats["connections"],
            waiting=waiting,
            matched=matched,
            circles=stats.get("circles", ()),
            status=stats.get("status", "serving"),  # a published server does not say
        )
    except DflockdError as exc:
        return ServerReport(inquiry.server, now, error=str(exc))
    except (KeyError, TypeError, ValueError) as exc:
        error = f"lock server {inquiry.server}: its answer cannot be read: {exc!r}"
        return ServerReport(inquiry.server, now, error=error)


def _waiting(server: str, found: Mapping[str, Any]) -> Waiting:
    holder, waiter = found["holder"] or {"label": "", "held_s": 0.0}, found["waiter"]
    rate = found.get("rate")
    return Waiting(
        server,
        found["key"],
        found["position"],
        found["waiters"],
        waiter["label"],
        waiter["waited_s"],
        holder["label"] or ("somebody" if found["holder"] else ""),
        holder["held_s"],
        found["pace_s"],
        waiter.get("group", ""),
        describe_rate(rate) if keeps_waiting(rate, waiter.get("weight", 1)) else "",
        _pause_of(found),
    )


def _of_found(server: str, found: Sequence[Mapping[str, Any]], others: Sequence[Row]) -> list[Row]:
    """Return a row for each key of what was found, and behind them those of others."""
    rows: dict[tuple[str, bool], Row] = {}
    for each in found:
        holder = each["holder"]
        row = Row(
            server,
            each["key"],
            each["limit"],
            each["holders"],
            each["waiters"],
            holder["label"] if holder else "",
            holder["held_s"] if holder else 0.0,
            used=each.get("used", 0),
            oldest_s=each["waiter"]["waited_s"] if each["waiter"] else 0.0,
            semaphore=each["space"] == "semaphore",
        )
        rows.setdefault((row.key, row.semaphore), row)
    for row in others:
        rows.setdefault((row.key, row.semaphore), row)
    return list(rows.values())


def _listed(server: str, stats: Mapping[str, Any]) -> Iterator[Row]:
    for lock in stats["locks"]:
        limit, holders = lock.get("limit", 1), lock.get("holders", 1)
        seen = lock["waiters"], lock["label"], lock["held_s"]
        yield Row(server, lock["key"], limit, holders, *seen, used=lock.get("used", 0))
    for each in stats["semaphores"]:
        seen = each["limit"], each["holders"], each["waiters"]
        yield Row(server, each["key"], *seen, semaphore=True)


def _pause_of(report: Mapping[str, Any]) -> str:
    return describe_pause(report["paused"]) if report.get("paused") else ""


def _longest(report: Mapping[str, Any]) -> float:
    """Return for how long who has waited longest has done so: where groups take turns not the first."""
    return max((waiter["waited_s"] for waiter in report["waiters"]), default=0.0)


def _looked_at(inquiry: Inquiry, row: Row) -> Row | None:
    """Return the row with its oldest holder; ``None`` if the key is free, or not here, by now."""
    try:
        report = inquiry.inspect(row.key, semaphore=row.semaphore)
    except (MovedError, RecoveringError):
        return None
    holders, waiters = report["holders"], len(report["waiters"])
    pace, paused = describe_rate(report.get("rate")), _pause_of(report)
    if not holders:
        # While it is paused, grants are withheld from waiters, or somebody has a turn.
        free = replace(row, holders=0, waiters=waiters, label="", held_s=0.0, rate=pace)
        free = replace(free, oldest_s=_longest(report), paused=paused)
        return free if waiters or paused else None
    oldest = max(holders, key=lambda holder: holder["held_s"])
    return replace(
        row,
        holders=len(holders) + (row.holders - len(holders) if report["omitted"] else 0),
        waiters=row.waiters if report["omitted"] else waiters,
        label=oldest["label"],
        held_s=oldest["held_s"],
        lease_s=oldest["lease_s"],
        left_s=oldest["lease_expires_in_s"],
        owner=oldest.get("owner", ""),
        attempt=oldest.get("attempt", 0),
        rate=pace,
        newer=oldest.get("superseded_by", ""),
        group=oldest.get("group", ""),
        used=report.get("used", 0),
        paused=paused,
        oldest_s=_longest(report),
    )


class Survey:
    """All servers, each asked by a thread of its own, so that none waits for one that is away.

    Args:
        servers: a list, or some servers of a cluster; its others are found, also later.
        interval: seconds from an answer to the next question.
        sort: one of `SORTS`, at first.
        auth_token: the servers' shared secret.
        ssl_context: for servers that speak TLS.
        notes: keys of notes as well; see `dflockd.admin.is_note`.

    Raises:
        InvalidArgumentError: the token cannot be one.
    """

    def __init__(
        self,
        servers: Servers,
        interval: float,
        sort: str = "waiters",
        auth_token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        *,
        notes: bool = False,
    ) -> None:
        self._question = Question(sort, notes=notes)
        self._interval = interval
        self._inquiry = partial(Inquiry, auth_token=auth_token, ssl_context=ssl_context)
        self._asked: dict[str, _Repeated[ServerReport]] = {}
        self._seeds = list(map(str, servers))
        self._roster: _Repeated[ShardCounts] | None = None
        self._report: ShardReport | None = None
        self._inquiry(self._seeds[0])  # checks the token
        if isinstance(servers, Seeds):
            self._roster = _Repeated(self._find, interval)
        else:
            self._follow(self._seeds)

    def close(self) -> None:
        """Ask nobody any more."""
        self._follow([])
        if self._roster is not None:
            self._roster.stop()

    def wait(self, seconds: float) -> None:
        """Wait until everybody has answered once, but no longer than so many seconds."""
        until = clock.now() + seconds
        if self._roster is not None:
            self._roster.answered.wait(seconds)
            self.shards()
        for asked in self._asked.values():
            asked.answered.wait(max(0.0, until - clock.now()))

    def wants(self, sort: str, text: str, *, waiters: bool) -> None:
        """Ask for something else from now on, and at once if it is."""
        question = replace(self._question, sort=sort, text=text, waiters=waiters)
        if question != self._question:
            self._question = question
            for asked in self._asked.values():
                asked.hurry()

    def shards(self) -> ShardCounts | None:
        """Return who is in the cluster; ``None`` without one, or while that is not known."""
        shards = self._roster.latest if self._roster is not None else None
        if shards is not None and shards.servers:
            self._follow(list(shards.servers))
        return shards

    def reports(self) -> list[ServerReport]:
        """Return what each server said last, those that never said anything aside."""
        found = (asked.latest for asked in self._asked.values())
        return [report for report in found if report is not None]

    def _follow(self, servers: Sequence[str]) -> None:
        for gone in self._asked.keys() - set(servers):
            self._asked.pop(gone).stop()
        for server in servers:
            if server not in self._asked:
                inquiry = self._inquiry(server)
                work = partial(ask, inquiry, lambda: self._question)
                self._asked[server] = _Repeated(work, self._interval, inquiry.close)

    def _find(self) -> ShardCounts:
        """Ask which servers there are; the first that answers knows."""
        error = ""
        for server in dict.fromkeys([*self._asked, *self._seeds]):
            inquiry = self._inquiry(server)
            try:
                report = self._report = inquiry.shards(self._report)
            except DflockdError as exc:
                error = error or str(exc)
                continue
            finally:
                inquiry.close()
            counts = Counter(report.shards)
            each = {str(address): counts[index] for index, address in enumerate(report.servers)}
            return ShardCounts(each, counts[-1])
        return ShardCounts({}, error=error)


class _Repeated(Generic[T]):
    """Something that is done again and again on a thread of its own, and what came of it last."""

    def __init__(
        self,
        work: Callable[[], T],
        interval: float,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.latest: T | None = None
        self.answered = threading.Event()
        self._stopped = threading.Event()
        self._hurry = threading.Event()
        # The end of the process does not wait for a server that is away.
        self._thread = threading.Thread(
            target=self._run, args=(work, interval, at_end), name="dflockd-top", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._hurry.set()

    def hurry(self) -> None:
        """Do it again now."""
        self._hurry.set()

    def _run(self, work: Callable[[], T], interval: float, at_end: Callable[[], None]) -> None:
        while not self._stopped.is_set():
            self._hurry.clear()
            self.latest = work()
            self.answered.set()
            if not self._stopped.is_set():
                self._hurry.wait(interval)
        at_end()
