"""What is handed over with a shard, as bytes: times as ages, for clocks of two machines.

Compact, for it has to get through etcd: a hundred thousand locks take about 6 MB, a million beginnings
of rates 2 MB.
"""

from __future__ import annotations

import json
import math
import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, TypeAlias

from dflockd.table import HoldRecord, NewestRecord, ReservedPosition, Snapshot, WaiterRecord
from dflockd.table.pauses import NEVER, PauseRecord
from dflockd.table.rates import RateRecord
from dflockd.wire import ALL, MAX_LIMIT, MAX_RATE, MAX_SECONDS, FairGroup, Space, read_json
from dflockd.wire.tokens import MAX_FENCE

_Row: TypeAlias = Sequence[Any]


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
        [_plain(newest) for newest in snapshot.newest],
        [_of_rate(rate, now) for rate in snapshot.rates],
        [_of_pause(pause, now) for pause in snapshot.pauses],
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
        of_epoch, holds, waiters, newest, rates, pauses, since = read_json(zlib.decompress(data))
        if of_epoch != epoch:
            raise BadSnapshotError(f"it is of epoch {of_epoch}, not of {epoch}")
        return Snapshot(
            [_hold(fields, now) for fields in holds],
            [_waiter(fields, now) for fields in waiters],
            tuple(NewestRecord(*_read(_NEWEST, fields)) for fields in newest),
            [_rate(fields, now) for fields in rates],
            [_pause(fields, now) for fields in pauses],
            -math.inf if since is None else now - float(since),
        )
    except (zlib.error, ValueError, TypeError, AttributeError) as exc:
        raise BadSnapshotError(str(exc)) from None


def _of_hold(hold: HoldRecord, now: float) -> _Row:
    left = max(0.0, _long(hold.deadline - now)) if hold.detached else hold.lease
    return _plain(hold._replace(lease=left, deadline=0, since=round(now - hold.since, 3)))


def _hold(fields: _Row, now: float) -> HoldRecord:
    hold = HoldRecord(*_read(_HOLD, fields))
    return hold._replace(deadline=now + hold.lease, since=now - hold.since)


def _of_waiter(waiter: WaiterRecord, now: float) -> _Row:
    reservation, group = waiter.reservation, waiter.group
    if reservation is not None:
        due, hold, until = reservation
        reservation = ReservedPosition(round(due - now, 3), _long(hold), _long(until - now))
    row = _plain(waiter._replace(since=round(now - waiter.since, 3), reservation=reservation))
    return [*row[:-1], group and (group.name.decode(), group.limit, group.weight)]


def _waiter(fields: _Row, now: float) -> WaiterRecord:
    waiter = WaiterRecord(*_read(_WAITER, fields))
    reservation = waiter.reservation
    if reservation is not None:
        due, hold, until = reservation
        reservation = ReservedPosition(now + due, hold, now + until)
    return waiter._replace(since=now - waiter.since, reservation=reservation)


def _of_rate(rate: RateRecord, now: float) -> _Row:
    """Return a rate with ages rounded down: runs count too long rather than too short.

    In milliseconds, and each but the first as what it is less than the one before: small numbers.
    """
    ages = [max(0, math.floor((now - time) * 1000 - 1e-3)) for time in rate.begun[::2]]
    steps = [before - age for before, age in pairwise(ages)]
    return [*_plain(rate._replace(begun=())), ages[:1], steps, list(map(int, rate.begun[1::2]))]


def _rate(fields: _Row, now: float) -> RateRecord:
    *others, first, steps, places = fields
    ages = accumulate(steps, operator.sub, initial=first[0]) if first else ()
    times = (now - age / 1000 for age in ages)
    rate = RateRecord(*_read(_RATE, others))
    return rate._replace(begun=tuple(chain.from_iterable(zip(times, places, strict=True))))


def _of_pause(pause: PauseRecord, now: float) -> _Row:
    left = None if pause.until == NEVER else _long(pause.until - now)
    return [*_plain(pause[:3]), round(now - pause.since, 3), left]


def _pause(fields: _Row, now: float) -> PauseRecord:
    pause = PauseRecord(*_read(_PAUSE, fields))
    return pause._replace(since=now - pause.since, until=now + pause.until)


def _plain(record: Iterable[Any]) -> list[Any]:
    """Return the fields of a record as JSON has them."""
    return [value.decode() if isinstance(value, bytes) else value for value in record]


def _read(kinds: Sequence[Callable[[Any], Any]], fields: _Row) -> list[Any]:
    """Return the fields of a record as they were."""
    return [kind(field) for kind, field in zip(kinds, fields, strict=True)]


def _long(seconds: float) -> float:
    """Return a time in milliseconds, rather too long than too short."""
    return math.ceil(seconds * 1000) / 1000


def _whole(most: int, value: object) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no whole number up to {most}")
    return value


def _group(value: tuple[str, int, int] | None) -> FairGroup | None:
    if value is None:
        return None
    name, limit, weight = value
    return FairGroup(name.encode(), _limit(limit), _weight(weight))


# How the fields of each record are read, in their order.
_text, _limit, _weight = str.encode, partial(_whole, MAX_LIMIT), partial(_whole, ALL)
_OWNER = _text, int, int
_HOLD = (
    *(Space, _text, _limit, partial(_whole, MAX_FENCE)),
    *(float, float, float, _text, bool, *_OWNER, partial(_whole, MAX_RATE), _text, _weight),
)
_WAITER = (
    *(Space, _text, _limit, _text, partial(_whole, MAX_SECONDS), float, _text),
    *(lambda value: value and ReservedPosition(*value), *_OWNER, _group),
)
_RATE = Space, _text, int, float, int, tuple
_NEWEST = _text, int, _text
_PAUSE = _text, _text, _text, float, lambda left: NEVER if left is None else float(left)
