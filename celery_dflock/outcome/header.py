"""What the message headers of a task say, written and read in one place.

The header ``dflock`` is a dict: a call's own options, the counters of a requeued task, and what keeps
others like it from being sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery.app.task import Context

HEADER = "dflock"
"""The message header of a call's own options, and of the counters of a requeued task: a dict."""

COUNTERS = ("attempt", "since", "place", "retries", "copy", "free")

UNIQUE = "unique"
"""The place in the header for the lock that keeps others like this task from being sent."""

FIRING = "dflock_firing"
"""The message header of a firing: a dict of its ``id``, ``entry`` and ``due`` and the ``fence``."""


def attempts(request: Context) -> dict[str, Any]:
    """Return what the header says of earlier attempts, or nothing at the first.

    A retry inherits the header of the run that sent it. That run had its lock, so counting starts
    anew.
    """
    history = _header(request)
    if history.get("retries") != request.retries:
        return {}
    return {name: history[name] for name in COUNTERS if name in history}


def options_of_call(request: Context) -> dict[str, Any]:
    """Return the options that this call names itself."""
    ours = (*COUNTERS, UNIQUE)
    return {name: value for name, value in _header(request).items() if name not in ours}


def unique_of(request: Context) -> dict[str, str] | None:
    """Return what `celery_dflock.unique` has sent along: ``key``, ``token``, ``until`` and ``id``.

    Only if it is this task's, for headers are handed on to other tasks. A sender of 0.1 that had just
    lost the lock sent no token.
    """
    ours = _header(request).get(UNIQUE)
    if not isinstance(ours, dict) or ours.get("id") != request.id or not ours.get("token"):
        return None
    return ours


def is_firing(request: Context) -> bool:
    """Whether a message is a firing. What a firing sends is none, though it may copy its headers."""
    about = (request.headers or {}).get(FIRING)
    return isinstance(about, dict) and about.get("id") == request.id


def uncounted(request: Context) -> dict[str, Any]:
    """Return what the header says beside the counters."""
    return {name: value for name, value in _header(request).items() if name not in COUNTERS}


def _header(request: Context) -> Mapping[str, Any]:
    headers = request.headers
    return (headers and headers.get(HEADER)) or {}
