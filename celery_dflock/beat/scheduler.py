"""The scheduler of ``celery beat -S dflock``: it runs another scheduler, or stands by."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from celery import Celery, platforms, signals
from celery.beat import ScheduleEntry, Service
from celery.utils.imports import qualname
from celery.utils.time import maybe_make_aware
from kombu.exceptions import OperationalError

from celery_dflock.beat.claims import Claims
from celery_dflock.beat.config import BeatSettings, beat_settings
from celery_dflock.beat.firing import Firing, due_after
from celery_dflock.beat.leadership import Lead, NotLeadingError, NotReservedError, led, restore
from celery_dflock.beat.store import store_for
from celery_dflock.config import settings
from celery_dflock.identity import process_label
from celery_dflock.look import describe
from dflockd import errors
from dflockd.sync_client import DistributedLock

PATIENCE = 5
"""Seconds that a standby waits in the queue at a time: between them Celery sees that it lives.

It wakes at once when the lock is granted or a signal comes.
"""

PAUSE = 0.5
"""Seconds after which a standby tries again what has failed."""

DOUBT_PAUSE = 0.1
"""Seconds between looks at whether a leader that has lost its connection still leads."""

logger = logging.getLogger("celery_dflock.beat")


class DflockScheduler:
    """Runs the scheduler of ``dflock_beat_scheduler`` while this process holds the beats' lock.

    The arguments are those that Celery gives to every scheduler.
    """

    lock_key = None  # RedBeat looks for one when beat starts, to take a lock of its own

    def __init__(
        self,
        app: Celery,
        schedule_filename: str | None = None,
        max_interval: float | None = None,
        lazy: bool = False,
        **kwargs: Any,
    ) -> None:
        self.app = app
        self._settings: BeatSettings = beat_settings(app)
        common = settings(app)
        self._arguments = {
            "app": app,
            "schedule_filename": schedule_filename,
            "max_interval": max_interval,
            **kwargs,
        }
        # Not set up, so that it neither reads nor writes anything: it answers what Celery asks.
        self._idle = self._settings.scheduler(lazy=True, **self._arguments)
        self._inner: Any = None
        self._lock = DistributedLock(
            self._settings.lock_key,
            max(1, min(PATIENCE, int(self.max_interval))),
            self._settings.lock_ttl,
            label=f"beat {process_label()}",
            **common.connection_options(),
        )
        self._claims = Claims(self._settings.lock_key, common)
        self._store = store_for(app, self._settings, schedule_filename)
        self._said = ""
        self._is_busy = False
        self._is_closing = False

    # What Celery asks.

    @property
    def max_interval(self) -> float:
        """The longest sleep in seconds; a leader may sleep less, see `tick`."""
        seconds: float = self._idle.max_interval
        return seconds

    @property
    def schedule(self) -> Any:
        """The entries by name; empty while this beat stands by."""
        return {} if self._inner is None else self._inner.schedule

    @property
    def info(self) -> str:
        """Lines for the banner."""
        lines = [f"    . runs -> {qualname(self._settings.scheduler)}"]
        if self._idle.info:
            lines.append(self._idle.info)
        lines += [
            f"    . last runs -> {self._store or 'kept by the scheduler'}",
            f"    . lock -> {self._lock.key} on {self._lock.server} ({self._lock.lease_ttl_s}s)",
            f"    . leader -> {self._leader()}",
        ]
        return "\n".join(lines)

    def tick(self) -> float:
        """Lead for one step, or stand by for a while; return the seconds until the next."""
        with self._busy():
            if self._inner is None:
                return self._stand_by()
            return self._lead()

    def should_sync(self) -> bool:
        """Whether the scheduler has something to write."""
        return self._inner is not None and bool(self._inner.should_sync())

    def _do_sync(self) -> None:
        with self._busy():
            try:
                self._inner._do_sync()
            except Exception as exc:
                self._fail(exc)

    def close(self) -> None:
        """Write what is left to write, and let the next beat lead."""
        self._is_closing = True
        if self._is_busy:
            # In the signal handler. It goes on with a SystemExit, and Celery closes once more after
            # it; here the lock or the scheduler would be used in the midst of using them.
            return
        inner, self._inner = self._inner, None
        try:
            if inner is not None:
                logger.info("beat: handing over")
                inner.close()
        finally:
            self._lock.release()
            if self._store is not None:
                self._store.close()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False
        if self._is_closing:
            raise SystemExit  # that of the signal handler came in a destructor, and was ignored

    # Standing by.

    def _stand_by(self) -> float:
        try:
            if self._lock.enqueue() == "queued":
                self._say(logging.INFO, f"standing by, {self._leader(since=False)} leads")
                if not self._lock.wait():
                    return 0
            self._take_over()
        except NotLeadingError as exc:
            self._step_down(exc)
        except errors.RemoteError as exc:
            self._say(logging.WARNING, f"standing by, no beat can lead: {exc}")
            self._drop()
            return PAUSE
        except Exception as exc:
            self._say(logging.ERROR, f"standing by, could not take over: {exc!r}", exc_info=True)
            self._drop()
            return PAUSE
        return 0

    def _take_over(self) -> None:
        lead = Lead(self._lock, self._claims, self._store)
        inner = self._inner = led(self._settings.scheduler, lead)(**self._arguments)
        inner.sync_every_tasks = 1
        if getattr(inner, "lock_key", None) is not None:
            inner.lock_key = None  # RedBeat's own
        if self._store is not None:
            restore(inner, self._store)
        self._say(
            logging.INFO, f"leading now, fence {self._lock.fence}, next due: {self._next_due()}"
        )
        self._finish(lead)

    def _finish(self, lead: Lead) -> None:
        """Send what the last leader claimed but did not confirm."""
        firing = self._claims.left(self._inner.schedule)
        if firing is None:
            return
        entry = self._entry(firing.entry)
        if entry is not None and lead.firing_of(entry) == firing:
            logger.info("beat: firing %s was claimed but not confirmed, it is due again", firing)
            return
        if entry is None:
            logger.warning("beat: firing %s was claimed, but its entry is gone: not sent", firing)
        elif not self._is_remembered(firing):
            logger.info("beat: firing %s was claimed but not confirmed, it is sent again", firing)
            try:
                self._inner.send(entry, firing)
            except Exception as exc:
                if isinstance(exc.__context__, OperationalError):
                    raise  # the broker is away, and nothing else could be sent either
                logger.exception("beat: firing %s cannot be sent, it is left out", firing)
        self._claims.clear()

    def _is_remembered(self, firing: Firing) -> bool:
        """Whether the store knows that the firing was sent.

        The entry does not tell: its scheduler may have recorded it before it was sent.
        """
        last = None if self._store is None else self._store.load().get(firing.entry)
        return last is not None and maybe_make_aware(last) >= firing.due

    def _entry(self, name: str) -> ScheduleEntry | None:
        entry = self._inner.schedule.get(name)
        if entry is None and hasattr(self._inner.Entry, "from_key"):
            # RedBeat's schedule is only what is due.
            Entry = self._inner.Entry
            try:
                return Entry.from_key(Entry.generate_key(self.app, name), app=self.app)
            except KeyError:
                return None
        return entry

    # Leading.

    def _lead(self) -> float:
        try:
            if not self._inner.lead.still_leads():
                self._say(
                    logging.WARNING, "in doubt whether it still leads: sends nothing until it knows"
                )
                return DOUBT_PAUSE
            if self._said.startswith("in doubt"):
                self._say(logging.INFO, f"still leading, fence {self._lock.fence}")
            seconds: float = self._inner.tick()
        except NotLeadingError as exc:
            self._step_down(exc)
            return 0
        except (Exception, NotReservedError) as exc:
            self._fail(exc)
            return PAUSE
        return min(seconds, self._settings.lock_ttl / 3)

    def _fail(self, why: BaseException) -> None:
        """Step down after an error of what the scheduler keeps its entries in.

        The next leader reads them anew.
        """
        self._say(logging.ERROR, f"no longer leading, could not go on: {why!r}", exc_info=True)
        self._drop()

    def _step_down(self, why: object) -> None:
        self._say(logging.WARNING, f"no longer leading: {why}")
        self._drop()

    def _drop(self) -> None:
        """Let go of the lock and the scheduler without writing anything."""
        inner, self._inner = self._inner, None
        try:
            if inner is not None:
                inner.forget()
        except Exception:
            logger.exception("beat: the scheduler could not be closed")
        finally:
            self._lock.release()

    # What people see.

    def _say(self, level: int, text: str, *, exc_info: bool = False) -> None:
        if text != self._said:
            self._said = text
            logger.log(level, "beat: %s (lock %r)", text, self._lock.key, exc_info=exc_info)

    def _leader(self, *, since: bool = True) -> str:
        try:
            holders = self._lock.inspect()["holders"]
        except errors.RemoteError as exc:
            return f"not known: {exc}"
        if not holders:
            return "nobody yet"
        return describe(holders[0]) if since else holders[0]["label"] or "somebody"

    def _next_due(self) -> str:
        entries = self._inner.schedule.values()
        due: list[tuple[datetime, str]] = [
            (due_after(e.schedule, e.last_run_at), e.name) for e in entries if e.last_run_at
        ]
        if not due:
            return "nothing"
        when, name = min(due)
        return f"{name!r} at {when.isoformat(' ', 'seconds')}"


@signals.beat_embedded_init.connect(dispatch_uid="celery_dflock.beat")
def _end_in_order(sender: Service, **_: Any) -> None:
    """Make the beat inside a worker end as ``celery beat`` does.

    Its own handler of SIGTERM only raises SystemExit. If that is ignored, as in destructors such as
    that of `AsyncResult`, the beat would continue and its worker wait for it to end.
    """
    if not isinstance(sender.scheduler, DflockScheduler):
        return

    def end(*_: Any) -> None:
        sender.sync()
        raise SystemExit

    platforms.signals["SIGTERM"] = end
