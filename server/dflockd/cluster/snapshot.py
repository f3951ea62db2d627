"""What is handed over with a shard, as text: times as ages, for clocks of two machines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from dflockd.table import HoldRecord, NewestRecord, Reservation, Snapshot, WaiterRecord
from dflockd.table.rates import RateRecord
from dflockd.wire import MAX_LIMIT, MAX_SECONDS, FairGroup, Space
from dflockd.wire.tokens import MAX_FENCE

_HOLD_OWNERS, _WAITER_OWNERS = "hold_owners", "place_owners"
_HOLD_AGES, _WAITER_AGES, _NEWEST = "hold_ages", "place_ages", "newest"
_RATES, _RATES_SINCE, _PENDING = "rates", "rates_since", "pending"
_HOLD_GROUPS, _WAITER_GROUPS = "hold_groups", "place_groups"


class BadSnapshotError(ValueError):
    """What is kept for the next server of a shard cannot be read."""


def dump(snapshot: Snapshot, epoch: int, now: float) -> bytes:
    """Return the text; it says of which epoch it is.

    A lease is handed over in full, so that its holder has time to find the new server; one that
    nobody is to renew, as far as it is left.
    """
    holds = [
        [
            *(hold.space, hold.key.decode(), hold.limit, hold.fence),
            max(0.0, hold.deadline - now) if hold.detached else hold.lease,
            now - hold.since,
            hold.label.decode(),
            int(hold.detached),
        ]
        for hold in snapshot.holds
    ]
    waiters = [
        [
            *(waiter.space, waiter.key.decode(), waiter.limit, waiter.ticket.decode()),
            waiter.lease,
            now - waiter.since,
            waiter.label.decode(),
            _ages(waiter.reservation, now),
        ]
        for waiter in snapshot.waiters
    ]
    document: dict[str, object] = {"epoch": epoch, "holds": holds, "places": waiters}
    # Of their own, for an older server takes the fields of the others by their position.
    if snapshot.rates:
        document[_RATES] = [_rate_ages(rate, now) for rate in snapshot.rates]
    if snapshot.rates_since > -math.inf:
        document[_RATES_SINCE] = now - snapshot.rates_since
    pending = [index for index, hold in enumerate(snapshot.holds) if hold.is_pending]
    if pending:
        document[_PENDING] = pending
    of_holds = _HOLD_OWNERS, _HOLD_AGES, snapshot.holds
    of_waiters = _WAITER_OWNERS, _WAITER_AGES, snapshot.waiters
    for name, ages_name, records in (of_holds, of_waiters):
        if owners := _owners(records):
            document[name] = owners
        if ages := _ages_of(records):
            document[ages_name] = ages
    if snapshot.newest:
        document[_NEWEST] = [
            (newest.key.decode(), newest.age, newest.label.decode()) for newest in snapshot.newest
        ]
    if hold_groups := [
        (index, hold.group.decode()) for index, hold in enumerate(snapshot.holds) if hold.group
    ]:
        document[_HOLD_GROUPS] = hold_groups
    if waiter_groups := [
        (index, waiter.group.name.decode(), waiter.group.limit)
        for index, waiter in enumerate(snapshot.waiters)
        if waiter.group is not None
    ]:
        document[_WAITER_GROUPS] = waiter_groups
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def load(text: bytes, epoch: int, now: float) -> Snapshot:
    """Read what `dump` wrote.

    Raises:
        BadSnapshotError: it cannot be read, or is of another epoch.
    """
    try:
        document: dict[str, Any] = json.loads(text)
        if document["epoch"] != epoch:
            raise BadSnapshotError(f"it is of epoch {document['epoch']}, not of {epoch}")
        holds = [_hold(now, *fields) for fields in document["holds"]]
        waiters = [_waiter(now, *fields) for fields in document["places"]]
        for index, owner, attempt in document.get(_HOLD_OWNERS, ()):
            holds[index] = holds[index]._replace(owner=owner.encode(), attempt=int(attempt))
        for index in document.get(_PENDING, ()):
            holds[index] = holds[index]._replace(is_pending=True)
        rates = [_rate(now, *fields) for fields in document.get(_RATES, ())]
        rates_since = now - float(document.get(_RATES_SINCE, math.inf))
        for index, owner, attempt in document.get(_WAITER_OWNERS, ()):
            waiters[index] = waiters[index]._replace(owner=owner.encode(), attempt=int(attempt))
        for index, group in document.get(_HOLD_GROUPS, ()):
            holds[index] = holds[index]._replace(group=group.encode())
        for index, group, most in document.get(_WAITER_GROUPS, ()):
            waiters[index] = waiters[index]._replace(group=FairGroup(group.encode(), int(most)))
        for index, age in document.get(_HOLD_AGES, ()):
            holds[index] = holds[index]._replace(age=int(age))
        for index, age in document.get(_WAITER_AGES, ()):
            waiters[index] = waiters[index]._replace(age=int(age))
        newest = tuple(
            NewestRecord(key.encode(), int(age), label.encode())
            for key, age, label in document.get(_NEWEST, ())
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
        raise BadSnapshotError(str(exc)) from None
    return Snapshot(holds, waiters, newest, rates, rates_since)


def _owners(records: Sequence[HoldRecord | WaiterRecord]) -> list[tuple[int, str, int]]:
    return [
        (index, record.owner.decode(), record.attempt)
        for index, record in enumerate(records)
        if record.owner
    ]


def _ages_of(records: Sequence[HoldRecord | WaiterRecord]) -> list[tuple[int, int]]:
    return [(index, record.age) for index, record in enumerate(records) if record.age]


def _hold(
    now: float,
    space: int,
    key: str,
    limit: int,
    fence: int,
    lease: float,
    age: float,
    label: str,
    detached: int,
) -> HoldRecord:
    return HoldRecord(
        Space(space),
        key.encode(),
        _whole(limit, MAX_LIMIT),
        _whole(fence, MAX_FENCE),
        lease,
        now + lease,
        now - age,
        label.encode(),
        bool(detached),
    )


def _waiter(
    now: float,
    space: int,
    key: str,
    limit: int,
    ticket: str,
    lease: int,
    age: float,
    label: str,
    reservation: list[float] | None,
) -> WaiterRecord:
    return WaiterRecord(
        Space(space),
        key.encode(),
        _whole(limit, MAX_LIMIT),
        ticket.encode(),
        _whole(lease, MAX_SECONDS),
        now - age,
        label.encode(),
        None if reservation is None else _reservation(now, *reservation),
    )


def _whole(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no whole number up to {most}")
    return value


def _rate_ages(rate: RateRecord, now: float) -> list[object]:
    """Return a rate with ages rounded down: runs count too long rather than too short."""
    ages = [max(0.0, math.floor((now - time) * 1000 - 1e-6) / 1000) for time in rate.times]
    return [rate.space, rate.key.decode(), rate.runs, rate.window, rate.number, ages]


def _rate(
    now: float,
    space: int,
    key: str,
    runs: int,
    window: float,
    number: int,
    ages: list[float],
) -> RateRecord:
    times = tuple(now - age for age in ages)
    return RateRecord(Space(space), key.encode(), int(runs), float(window), int(number), times)


def _reservation(now: float, due: float, hold: float, until: float) -> Reservation:
    return Reservation(now + due, hold, now + until)


def _ages(reservation: Reservation | None, now: float) -> tuple[float, float, float] | None:
    return reservation and (reservation.due - now, reservation.hold, reservation.until - now)
