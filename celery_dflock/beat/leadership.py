"""What changes in a scheduler that leads: it asks before it sends, and remembers afterwards."""

from __future__ import annotations

import logging
import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import schedstate
from celery.utils.time import maybe_make_aware

from celery_dflock.beat.claims import Claims
from celery_dflock.beat.firing import Firing, counts_from_last_run, due_after, latest_due
from celery_dflock.beat.store import Runs, Store
from celery_dflock.locks import is_kept
from dflockd import clock, errors
from dflockd.sync_client import DistributedLock

MOST_AHEAD = timedelta(minutes=5)
"""A stored last run that is later than that after now comes from a clock that was wrong."""

logger = logging.getLogger("celery_dflock.beat")


class NotLeadingError(BaseException):
    """The lock is lost. Not an `Exception`: schedulers log those and continue with the next entry."""


class NotReservedError(BaseException):
    """The scheduler could not reserve a firing, and may have recorded it as sent nonetheless.

    Not an `Exception`: RedBeat logs those, and the claim of its next firing would replace this one's.
    """


def _ahead() -> float:
    """Return by how many seconds the time of day is ahead of a clock that nobody sets."""
    return time.time() - clock.now()


class Lead:
    """One term of leadership, from a grant until the lock is lost or the process ends.

    Args:
        lock: the lock, held.
        claims: those of the same key.
        store: where the last runs are kept; ``None`` if the scheduler shares them itself.
    """

    def __init__(self, lock: DistributedLock, claims: Claims, store: Store | None) -> None:
        self._lock = lock
        self._claims = claims
        self.store = store
        self.is_over = False
        self._ahead = _ahead()
        self._unsaved: Runs = {}

    @property
    def held(self) -> bool:
        """Whether the lock is certainly held, and still in this term."""
        return self._lock.held and not self.is_over

    def still_leads(self) -> bool:
        """Return whether this beat still leads; ``False`` while that is in doubt.

        Raises:
            NotLeadingError: the lock is lost, or the clock was set back. Then a scheduler waits for
                the times of before, and the next leader counts from now.
        """
        if not is_kept(self._lock):
            raise NotLeadingError("its lease has ended, or the lock server forgot it")
        ahead = _ahead()
        if ahead < self._ahead - MOST_AHEAD.total_seconds():
            raise NotLeadingError(f"its clock was set back by {self._ahead - ahead:.0f} s")
        self._ahead = max(self._ahead, ahead)
        return self._lock.held

    @property
    def fence(self) -> int | None:
        """The number of the grant."""
        return self._lock.fence

    def firing_of(self, entry: ScheduleEntry) -> Firing:
        """Return the firing that an entry is due for, or the next one."""
        now = entry.default_now()
        due = latest_due(entry.schedule, entry.last_run_at or now, now)
        return Firing(self._lock.key, entry.name, due)

    def keeps_times_of(self, entry: ScheduleEntry) -> bool:
        """Whether the last run of an entry is the time at which it was due, however late it was sent.

        With the time of sending, as Celery has it, each delay would put off all later runs.
        """
        return self.store is not None and counts_from_last_run(entry.schedule)

    def begin(self, firing: Firing) -> None:
        """Claim a firing, and ask the lock server whether this beat leads.

        The lease alone is not enough: a restarted server has forgotten it and may have granted the
        lock to another beat.

        Raises:
            NotLeadingError: this beat does not lead, or no server answers.
        """
        self.check()
        try:
            self._claims.take(firing)
            leads = self._lock.renew()
        except errors.RemoteError as exc:
            raise NotLeadingError(str(exc)) from exc
        if not leads:
            raise NotLeadingError("the lock server no longer knows this leader")

    def check(self) -> None:
        """Check the lease without asking the server, just before a message is sent.

        In doubt this waits until it is certain again.

        Raises:
            NotLeadingError: the lease has ended.
        """
        try:
            self._lock.check()
        except errors.LockLostError as exc:
            raise NotLeadingError("its lease has ended") from exc
        if self.is_over:
            raise NotLeadingError("its term has ended")

    def give_up(self, unsent: bool) -> None:
        """End the term. The claim stays if its firing was reserved but not sent.

        A scheduler may already have recorded that firing as sent, so that no beat would find it due.
        The next leader, this beat included, sends what is claimed.
        """
        self.is_over = True
        if unsent:
            self._claims.leave()
        else:
            self._claims.confirm()

    def end(self, entry: ScheduleEntry) -> None:
        """Remember that a firing has been sent; `entry` is its entry afterwards."""
        if self.store is not None:
            self._unsaved[entry.name] = entry.last_run_at
            try:
                self.store.save(self._unsaved)
                self._unsaved = {}
            except Exception:
                # Whatever it is: the message is out, and the next firing tries again.
                logger.exception("beat: the last run of %r could not be stored", entry.name)
        self._claims.confirm()


class Led:
    """Mixed into the class of a scheduler, in front of it; see `led`."""

    lead: Lead
    _under_way: tuple[Firing, ScheduleEntry] | None = None
    """The firing that has been reserved and not sent yet, and its entry as it is after it."""

    if TYPE_CHECKING:
        app: Any
        schedule: Any

    def is_due(self, entry: ScheduleEntry) -> Any:
        """Ask the scheduler, but count the time to the next run from the due time."""
        is_due, seconds = super().is_due(entry)  # type: ignore[misc]
        if is_due and self.lead.keeps_times_of(entry):
            following = due_after(entry.schedule, self.lead.firing_of(entry).due)
            seconds = (following - maybe_make_aware(entry.default_now())).total_seconds()
        return schedstate(is_due, seconds)

    def reserve(self, entry: ScheduleEntry) -> ScheduleEntry:
        """Claim the firing, then let the scheduler record it."""
        firing = self.lead.firing_of(entry)
        self.lead.begin(firing)
        self._under_way = firing, entry
        try:
            after = super().reserve(entry)  # type: ignore[misc]
        except Exception as exc:
            raise NotReservedError(f"{firing}: {exc!r}") from exc
        if self.lead.keeps_times_of(entry):
            after.last_run_at = firing.due
        self._under_way = firing, after
        return after

    def apply_async(
        self, entry: ScheduleEntry, producer: Any = None, advance: bool = True, **kwargs: Any
    ) -> Any:
        """Send the firing under its own id, if this beat still leads."""
        if advance:
            entry = self.reserve(entry)
        if self._under_way is None or self._under_way[0].entry != entry.name:
            firing = self.lead.firing_of(entry)
            self.lead.begin(firing)
            self._under_way = firing, entry
        firing, after = self._under_way
        try:
            result = self.send(entry, firing, producer=producer, **kwargs)
        except Exception:
            # No broker. The scheduler logs it and goes on, as it does without us.
            self._end(after)
            raise
        self._end(after)
        logger.info("beat: sent firing %s", firing)
        return result

    def send(self, entry: ScheduleEntry, firing: Firing, **kwargs: Any) -> Any:
        """Send a firing that is claimed."""
        # Not the entry itself: Celery writes the schedule before this returns, and it would keep the
        # id. A copy made in its own way would read it anew.
        once = object.__new__(type(entry))
        vars(once).update(vars(entry), options=firing.options(entry.options, self.lead.fence))
        self.lead.check()
        return super().apply_async(once, advance=False, **kwargs)  # type: ignore[misc]

    def sync(self) -> None:
        """Write, while no other beat can be writing."""
        if self.lead.held:
            super().sync()  # type: ignore[misc]

    def forget(self) -> None:
        """End without writing anything: another beat leads."""
        self.lead.give_up(unsent=self._under_way is not None)
        shelf = getattr(self, "_store", None)
        if shelf is not None and getattr(shelf, "cache", None):
            shelf.cache.clear()  # it would be written when the shelf is closed or dropped
        self.close()  # type: ignore[attr-defined]

    def _end(self, after: ScheduleEntry) -> None:
        self._under_way = None
        self.lead.end(after)


def restore(inner: Scheduler, store: Store) -> None:
    """Give a new scheduler the last runs that the last leader stored."""
    runs, schedule = store.load(), inner.schedule
    for name, entry in schedule.items():
        entry.last_run_at = _credible(entry, runs.get(name, entry.last_run_at))
    store.forget(runs.keys() - schedule.keys())
    # With those that are new: the next leader must not count from its own start again.
    store.save({name: entry.last_run_at for name, entry in schedule.items()})


def _credible(entry: ScheduleEntry, last_run_at: datetime | None) -> datetime | None:
    """Return the last run of an entry, or now if it lies in the future: nothing was due until then."""
    now: datetime = entry.default_now()
    if last_run_at is None or maybe_make_aware(last_run_at) - maybe_make_aware(now) <= MOST_AHEAD:
        return last_run_at
    logger.warning(
        "beat: the last run of %r is said to be at %s, which is to come: a clock was wrong, and the "
        "entry counts from now",
        entry.name,
        last_run_at.isoformat(" ", "seconds"),
    )
    return now


def led(cls: type[Scheduler], lead: Lead) -> type[Any]:
    """Return the class of a scheduler with `Led` in front."""
    return type(cls.__name__, (Led, cls), {"lead": lead, "__module__": cls.__module__})
