"""Which beat of an app leads and what is due next, for programs that are not a beat."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from celery import Celery
from celery.exceptions import ImproperlyConfigured
from celery.schedules import maybe_schedule

from celery_dflock.beat.config import beat_settings, lock_key
from celery_dflock.beat.firing import due_after
from celery_dflock.beat.store import store_for
from celery_dflock.config import settings
from dflockd.errors import DflockdError
from dflockd.sync_client import DistributedLock

NAMES = ("dflock_beat_scheduler", "dflock_beat_lock_key", "dflock_beat_lock_ttl")


def beat_status(app: Celery) -> dict[str, Any] | None:
    """Return which beat leads, for how many seconds, how many stand by, and the next due firing.

    The next firing is known if the beats share the last runs in a store and their scheduler can be
    loaded here; that of django-celery-beat needs a Django that is set up. Return ``None`` if the
    app does not seem to have such beats, or if its lock server does not answer.

    Raises:
        ImproperlyConfigured: a setting is bad.
    """
    key = lock_key(app)
    lock = DistributedLock(key, **settings(app).connection_options())
    try:
        report = lock.inspect()
    except DflockdError:
        return None
    holders, waiters = report["holders"], report["waiters"]
    is_set = app.conf.beat_scheduler == "dflock" or any(app.conf.get(name) for name in NAMES)
    if not (holders or waiters or is_set):
        return None
    row: dict[str, Any] = {
        "beat": key,
        "leader": holders[0]["label"] or "somebody" if holders else None,
        "leads_s": holders[0]["held_s"] if holders else None,
        "standing_by": len(waiters),
    }
    try:
        name, due = _next_due(app)
    except ImproperlyConfigured as exc:  # what beat needs and this process need not have
        return {
            **row,
            "next": None,
            "next_due": None,
            "note": f"cannot tell what is due next: {exc}",
        }
    except Exception as exc:  # whatever the store raises
        return {**row, "error": f"cannot tell what is due next: {exc}"}
    return {**row, "next": name, "next_due": due.isoformat() if due else None}


def _next_due(app: Celery) -> tuple[str | None, datetime | None]:
    store = store_for(app, beat_settings(app), None)
    if store is None:
        return None, None
    try:
        runs = store.load()
    finally:
        store.close()
    entries = app.conf.beat_schedule
    dues = [
        (due_after(maybe_schedule(entries[name]["schedule"], app=app), last), name)
        for name, last in runs.items()
        if name in entries
    ]
    if not dues:
        return None, None
    due, name = min(dues)
    return name, due.astimezone(UTC)


def status_line(row: dict[str, Any]) -> str:
    """Return the status as text."""
    leads = (
        f"led by {row['leader']} for {row['leads_s']:.0f} s" if row["leader"] else "nobody leads"
    )
    due = f", next due: {row['next']!r} at {row['next_due']}" if row.get("next") else ""
    more = "".join(f", {row[name]}" for name in ("note", "error") if name in row)
    return f"{row['beat']}: {leads}, {row['standing_by']} standing by{due}{more}"
