"""What is handed over with a shard, as bytes: times as ages, for clocks of two machines.

Compact, for it has to get through etcd: a hundred thousand locks take about 3 MB, a million beginnings
of rates as much.
"""

from __future__ import annotations

import json
import math
import operator
import zlib
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import TypeAlias

from dflockd.table import HoldRecord, NewestRecord, Reservation, Snapshot, WaiterRecord
from dflockd.table.rates import RateRecord
from dflockd.wire import MAX_LIMIT, MAX_SECONDS, FairGroup, Space
from dflockd.wire.tokens import MAX_FENCE

_Ages: TypeAlias = tuple[float, float, float]


class BadSnapshotError(ValueError):
    """What is kept for the next server of a shard cannot be read."""


def dump(snapshot: Snapshot, epoch: int, now: float) -> bytes:
    """Return it as bytes, which say of which epoch it is.

    A lease is handed over in full, so that its holder has time to find the new server; one that
    nobody is to renew, as far as it is left.
    """
    since = snapshot.rates_since
    document = (
        epoch,
        [_of_hold(hold, now) for hold in snapshot.holds],
        [_of_waiter(waiter, now) for waiter in snapshot.waiters],
        [(newest.key.decode(), newest.age, newest.label.decode()) for newest in snapshot.newest],
        [_of_rate(rate, now) for rate in snapshot.rates],
        None if since == -math.inf else now - since,
    )
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return zlib.compress(text.encode(), 1)


def load(data: bytes, epoch: int, now: float) -> Snapshot:
    """Read what `dump` wrote.

    Raises:
        BadSnapshotError: it cannot be read, or is of another epoch.
    """
    try:
        of_epoch, holds, waiters, newest, rates, since = json.loads(zlib.decompress(data))
        if of_epoch != epoch:
            raise BadSnapshotError(f"it is of epoch {of_epoch}, not of {epoch}")
        return Snapshot(
            [_hold(now, *fields) for fields in holds],
            [_waiter(now, *fields) for fields in waiters],
            tuple(
                NewestRecord(key.encode(), int(age), label.encode()) for key, age, label in newest
            ),
            [_rate(now, *fields) for fields in rates],
            -math.inf if since is None else now - float(since),
        )
    except (zlib.error, ValueError, TypeError, AttributeError) as exc:
        raise BadSnapshotError(str(exc)) from None


def _of_hold(hold: HoldRecord, now: float) -> tuple[object, ...]:
    return (
        *(hold.space, hold.key.decode(), hold.limit, hold.fence),
        max(0.0, _long(hold.deadline - now)) if hold.detached else hold.lease,
        round(now - hold.since, 3),
        hold.label.decode(),
        int(hold.detached),
        *(hold.owner.decode(), hold.attempt, hold.age),
        int(hold.is_pending),
        hold.group.decode(),
    )


def _hold(
    now: float,
    space: int,
    key: str,
    limit: int,
    fence: int,
    lease: float,
    since: float,
    label: str,
    detached: int,
    owner: str,
    attempt: int,
    age: int,
    pending: int,
    group: str,
) -> HoldRecord:
    return HoldRecord(
        Space(space),
        key.encode(),
        _whole(limit, MAX_LIMIT),
        _whole(fence, MAX_FENCE),
        lease,
        now + lease,
        now - since,
        label.encode(),
        bool(detached),
        owner.encode(),
        int(attempt),
        int(age),
        bool(pending),
        group.encode(),
    )


def _of_waiter(waiter: WaiterRecord, now: float) -> tuple[object, ...]:
    reservation, group = waiter.reservation, waiter.group
    return (
        *(waiter.space, waiter.key.decode(), waiter.limit, waiter.ticket.decode(), waiter.lease),
        round(now - waiter.since, 3),
        waiter.label.decode(),
        reservation
        and (
            round(reservation.due - now, 3),
            _long(reservation.hold),
            _long(reservation.until - now),
        ),
        *(waiter.owner.decode(), waiter.attempt, waiter.age),
        group and (group.name.decode(), group.limit),
    )


def _waiter(
    now: float,
    space: int,
    key: str,
    limit: int,
    ticket: str,
    lease: int,
    since: float,
    label: str,
    reservation: _Ages | None,
    owner: str,
    attempt: int,
    age: int,
    group: tuple[str, int] | None,
) -> WaiterRecord:
    reserved = None
    if reservation is not None:
        due, hold, until = reservation
        reserved = Reservation(now + due, hold, now + until)
    return WaiterRecord(
        Space(space),
        key.encode(),
        _whole(limit, MAX_LIMIT),
        ticket.encode(),
        _whole(lease, MAX_SECONDS),
        now - since,
        label.encode(),
        reserved,
        owner.encode(),
        int(attempt),
        int(age),
        None if group is None else FairGroup(group[0].encode(), int(group[1])),
    )


def _of_rate(rate: RateRecord, now: float) -> tuple[object, ...]:
    """Return a rate with ages rounded down: runs count too long rather than too short.

    In milliseconds, and each but the first as what it is less than the one before: small numbers.
    """
    ages = [max(0, math.floor((now - time) * 1000 - 1e-3)) for time in rate.times]
    steps = [before - age for before, age in pairwise(ages)]
    return (rate.space, rate.key.decode(), rate.runs, rate.window, rate.number, ages[:1], steps)


def _rate(
    now: float,
    space: int,
    key: str,
    runs: int,
    window: float,
    number: int,
    first: list[int],
    steps: Iterable[int],
) -> RateRecord:
    ages = accumulate(steps, operator.sub, initial=first[0]) if first else ()
    times = tuple(now - age / 1000 for age in ages)
    return RateRecord(Space(space), key.encode(), int(runs), float(window), int(number), times)


def _long(seconds: float) -> float:
    """Return a time in milliseconds, rather too long than too short."""
    return math.ceil(seconds * 1000) / 1000


def _whole(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no whole number up to {most}")
    return value
