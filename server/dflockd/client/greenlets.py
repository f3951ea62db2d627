"""What gevent and eventlet need beyond their monkey patches."""

from __future__ import annotations

import importlib.util
import select
import selectors
import sys
from typing import Any


def current_hub() -> Any:
    """Return what runs the greenlets of this thread; ``None`` where threads are the system's own.

    Each thread has its own. What waits in one, be it a greenlet or a poller, is no good in another.
    """
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        return sys.modules["gevent"].get_hub()
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        return sys.modules["eventlet.hubs"].get_hub()
    return None


def make_selector() -> selectors.BaseSelector:
    """Return a selector for descriptors that others may read, close or unregister meanwhile.

    The one that eventlet puts in the place of the system's knows no such liberties: its hub refuses
    a second reader of a descriptor, and one that is closed makes every further `select` fail. So
    the system's is used, and `select_green` waits for it.
    """
    patcher = _eventlet_patcher()
    if patcher is None:
        return selectors.DefaultSelector()
    spec = importlib.util.find_spec("selectors")
    if spec is None or spec.loader is None:
        return selectors.DefaultSelector()
    unpatched = importlib.util.module_from_spec(spec)
    patched = sys.modules["select"]
    sys.modules["select"] = patcher.original("select")
    try:
        spec.loader.exec_module(unpatched)
    finally:
        sys.modules["select"] = patched
    selector: selectors.BaseSelector = unpatched.DefaultSelector()
    # What has no descriptor of its own, on Windows, cannot be waited for in the hub.
    return selector if hasattr(selector, "fileno") else selectors.DefaultSelector()


def select_green(
    selector: selectors.BaseSelector, seconds: float | None
) -> list[tuple[selectors.SelectorKey, int]]:
    """Wait for a selector of `make_selector`; other greenlets go on meanwhile."""
    if _eventlet_patcher() is not None and hasattr(selector, "fileno"):
        select.select([selector], [], [], seconds)
        seconds = 0
    return selector.select(seconds)


def _eventlet_patcher() -> Any:
    """Return ``eventlet.patcher`` if it has patched `select`."""
    patcher = sys.modules.get("eventlet.patcher")
    return patcher if patcher is not None and patcher.is_monkey_patched("select") else None
