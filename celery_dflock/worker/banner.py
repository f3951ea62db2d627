"""The lock servers in the banner of a worker: a line for each, below Celery's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from celery import Celery, signals
from celery.exceptions import ImproperlyConfigured

from celery_dflock.config import Settings, settings, with_remedy
from celery_dflock.outcome.outage import outages
from celery_dflock.worker.errands import at_once
from celery_dflock.worker.spelling import ignored
from dflockd import admin, clock
from dflockd.errors import DflockdError

PATIENCE = 2.0
"""Seconds that the start of a worker waits for its lock servers."""

logger = logging.getLogger("celery_dflock")


@signals.celeryd_after_setup.connect(dispatch_uid="celery_dflock.banner")
def add_servers(instance: Any, **_: Any) -> None:
    """Ask the lock servers how they are, and put it into the banner; log those that do not answer."""
    for text in ignored(instance.app):
        logger.warning("%s", text)
    lines = list(_lines(instance.app))
    instance.extra_info = partial(_with, lines, instance.extra_info)


def _with(lines: list[str], others: Callable[[], str | None]) -> str:
    return "\n".join(["[lock servers]", *lines, "", others() or ""])


def _lines(app: Celery) -> list[str]:
    try:
        app_settings = settings(app)
    except ImproperlyConfigured as exc:
        return [f"  .> {exc}"]
    if not app_settings.enabled:
        return ["  .> not used: dflock_enabled is False"]
    found = ask_all(app_settings)
    for server, (is_there, text) in found.items():
        if not is_there:
            outages.away(server, text, tasks=0)
    width = max(map(len, found))
    return [
        f"  .> {server:{width}}  {text if is_there else f'unavailable: {text}'}"
        for server, (is_there, text) in found.items()
    ]


def ask_all(app_settings: Settings) -> dict[str, tuple[bool, str]]:
    """Ask all servers of an app at once; return whether each answers, and what there is to say."""
    deadline = clock.now() + PATIENCE
    names = list(map(str, app_settings.servers))
    if app_settings.is_cluster:
        members: list[str] = []

        def find() -> None:
            with suppress(DflockdError):  # each of them is asked, and says why
                members.extend(admin.members(app_settings.servers, **app_settings.credentials()))

        at_once([find], deadline)
        names = members or names
    late = f"no answer within {PATIENCE:g} s"
    found = dict.fromkeys(names, (False, late))
    at_once([partial(_ask, app_settings, name, found) for name in names], deadline)
    return dict(found)


def _ask(app_settings: Settings, server: str, found: dict[str, tuple[bool, str]]) -> None:
    try:
        stats = admin.stats(server, **app_settings.credentials())
    except DflockdError as exc:
        why = with_remedy(exc).removeprefix("lock ").removeprefix(f"server {server}")
        found[server] = False, why.removeprefix(":").lstrip()
        return
    found[server] = True, describe(stats)


def describe(stats: dict[str, Any]) -> str:
    """Return what a server says of itself, in a few words."""
    keys = len(stats["locks"]) + len(stats["semaphores"]) + stats.get("omitted", 0)
    version = f"dflockd {stats['version']}" if "version" in stats else "does not say its version"
    mode = f", {_MODES.get(stats['mode'], stats['mode'])}" if "mode" in stats else ""
    return f"{version}{mode}, {keys} {'key' if keys == 1 else 'keys'} held"


_MODES = {
    "memory": "in memory",
    "state directory": "with a state directory",
    "cluster": "in a cluster",
}
