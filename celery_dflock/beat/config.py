"""The ``dflock_beat_*`` settings of a Celery app."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from celery import Celery
from celery.beat import PersistentScheduler, Scheduler
from celery.exceptions import ImproperlyConfigured
from celery.utils.imports import load_extension_class_names, symbol_by_name

from celery_dflock.checks import is_whole
from celery_dflock.config import bad_setting, good, settings
from celery_dflock.keys import encode, finish, is_plain
from celery_dflock.options import MAX_SECONDS

DEFAULT_SCHEDULER = "celery.beat:PersistentScheduler"
DEFAULT_LOCK_TTL = 10


@dataclass(frozen=True, slots=True)
class BeatSettings:
    """The settings of the beats of one app, checked.

    Attributes:
        scheduler: ``dflock_beat_scheduler``: the scheduler class that keeps the schedule, its dotted
            name, or a name that ``celery beat -S`` accepts.
        lock_key: ``dflock_beat_lock_key``: the key whose holder sends, with ``dflock_key_prefix`` in
            front. Default: ``celery-beat`` and the name of the app.
        lock_ttl: ``dflock_beat_lock_ttl``: the lease, in seconds. If the leader is cut off, no beat
            sends for up to this time.
        store: ``dflock_beat_store``: where the beats share the last runs: the URL of a Redis, or
            ``file:`` and a path. ``None`` finds one, ``False`` leaves it to the scheduler.
    """

    scheduler: type[Scheduler]
    lock_key: str
    lock_ttl: int
    store: str | bool | None

    @property
    def needs_store(self) -> bool:
        """Whether the last runs must be shared, since the scheduler keeps them for itself."""
        if self.store is not None:
            return self.store is not False
        kept_in_memory = (
            self.scheduler.sync is Scheduler.sync and self.scheduler.reserve is Scheduler.reserve
        )
        return kept_in_memory or issubclass(self.scheduler, PersistentScheduler)


def beat_settings(app: Celery) -> BeatSettings:
    """Return the beat settings of an app as they are now.

    Raises:
        ImproperlyConfigured: a value is bad; one line names the setting, the value and a remedy.
    """
    conf = app.conf
    if not settings(app).enabled:
        raise ImproperlyConfigured(
            "dflock_enabled is False: start beat without -S dflock, or enable locks"
        )
    return BeatSettings(
        lock_key=lock_key(app),
        lock_ttl=good(
            *(conf, "dflock_beat_lock_ttl", DEFAULT_LOCK_TTL),
            *(partial(is_whole, least=1, most=MAX_SECONDS), "whole seconds, 1 or more"),
        ),
        scheduler=_scheduler(conf.get("dflock_beat_scheduler") or DEFAULT_SCHEDULER),
        store=_store(conf.get("dflock_beat_store")),
    )


def lock_key(app: Celery) -> str:
    """Return the key of the beats of an app, with its prefix.

    Raises:
        ImproperlyConfigured: it is bad.
    """
    default_key = f"celery-beat:{encode(app.main)}" if app.main else "celery-beat"
    key = app.conf.get("dflock_beat_lock_key") or default_key
    if not isinstance(key, str) or not is_plain(key):
        raise bad_setting("dflock_beat_lock_key", key, "text without white space")
    return finish(key, settings(app).key_prefix)


def _scheduler(name: Any) -> type[Scheduler]:
    aliases = dict(load_extension_class_names("celery.beat_schedulers"))
    try:
        found = symbol_by_name(name, aliases=aliases)
    except Exception as exc:  # of its module: Django's, for one, if it is not set up
        text = " ".join(str(exc).split())
        raise ImproperlyConfigured(f"dflock_beat_scheduler {name!r}: {text}") from exc
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise bad_setting("dflock_beat_scheduler", name, "the scheduler that -S dflock should run")
    return found


def _store(value: Any) -> str | bool | None:
    is_url = isinstance(value, str) and (
        "redis" in value.partition("://")[0] or value.startswith(("sentinel://", "file:"))
    )
    if value is None or value is False or is_url:
        store: str | bool | None = value
        return store
    scheme = value.partition(":")[0] if isinstance(value, str) else value
    raise ImproperlyConfigured(
        f"dflock_beat_store begins with {scheme!r}: give redis://..., file:/path, or False"
    )
