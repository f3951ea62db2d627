"""Settings and variables that nobody reads: a misspelled name, or one without the app's namespace.

Celery ignores settings that it does not know. A worker whose `CELERY_DFLOCK_SERVERS` is misspelled
would ask the lock server on its own host.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from celery import Celery, Task
from celery.app.defaults import DEFAULTS
from celery.utils.collections import DictAttribute

from celery_dflock import gate
from celery_dflock.beat.config import BeatSettings
from celery_dflock.config import NAMES, VARIABLES
from celery_dflock.options import OPTIONS

PREFIX = "dflock_"
VARIABLE_PREFIX = "DFLOCK_"
NAMESPACE = "CELERY_"
"""What most apps have, and what is written in vain where `config_from_object` was not told so."""
LINKS = ("DFLOCK_PORT", "DFLOCK_SERVICE_")
"""What Kubernetes calls the variables of a service named dflock."""
KNOWN = (*NAMES, *(f"{PREFIX}beat_{field.name}" for field in fields(BeatSettings)))

_UNSET = object()


def ignored(app: Celery) -> list[str]:
    """Return a line for each setting of an app that looks like one of ours and has no effect.

    And for each variable of the environment.
    """
    conf = app.conf.finalize()
    found = [line for name in sorted(_names(conf)) if (line := _what_is_wrong(name, conf))]
    found += filter(None, map(_without_base, app.tasks.values()))
    found += filter(None, (_of_environment(name, conf) for name in sorted(os.environ)))
    return found


def _without_base(task: Task) -> str:
    """Return what is wrong with a task that has options of a lock, and takes none."""
    names = [name for name in OPTIONS if hasattr(task, name)]
    if not names or hasattr(task, "_lock_options") or gate.is_of_celery(type(task)):
        return ""
    return (
        f"task {task.name} takes no lock: {', '.join(names)} without the base LockedTask: "
        f"write @app.task(base=LockedTask, {names[0]}=...)"
    )


def _of_environment(name: str, conf: Any) -> str:
    """Return what is wrong with a variable."""
    plain = name.removeprefix(NAMESPACE)
    if not plain.startswith(VARIABLE_PREFIX) or plain.startswith(LINKS) or name in VARIABLES:
        return ""
    if name != plain and (plain.lower() not in KNOWN or _has(conf, plain.lower())):
        return ""  # one of the app's own, which sets it itself
    if plain.lower() in KNOWN and plain not in VARIABLES:
        return f"the variable {name} is ignored: set {plain.lower()} in the app"
    near = difflib.get_close_matches(plain, VARIABLES, 1)
    return f"the variable {name} is ignored" + (f": did you mean {near[0]}?" if near else "")


def _what_is_wrong(name: str, conf: Any) -> str | None:
    namespace = conf.prefix or ""
    plain = name.lower().removeprefix(namespace.lower()).removeprefix(NAMESPACE.lower())
    if not plain.startswith(PREFIX):
        return None
    if plain in KNOWN:
        if _has(conf, plain):
            return None
        right = f"{namespace}{plain.upper()}" if namespace else plain
        if not namespace and name.startswith(NAMESPACE):
            right += ", or give config_from_object namespace='CELERY'"
        return f"the setting {name} is ignored: write {right}"
    # Without what all of them begin with, or all of them would be close.
    ends = [each.removeprefix(PREFIX) for each in KNOWN]
    near = difflib.get_close_matches(plain.removeprefix(PREFIX), ends, 1)
    right = PREFIX + near[0] if near else ""
    if namespace and name.isupper():
        right = f"{namespace}{right}".upper()
    return f"{name} is not a setting" + (f": did you mean {right}?" if near else "")


def _has(conf: Any, name: str) -> bool:
    return conf.get(name, _UNSET) is not _UNSET


def _names(conf: Any) -> Iterator[str]:
    for mapping in conf.maps:
        # To iterate over an object would read every attribute, and those of Django can be expensive.
        names = dir(mapping.obj) if isinstance(mapping, DictAttribute) else list(mapping)
        if mapping is not DEFAULTS:
            yield from (name for name in names if isinstance(name, str) and PREFIX in name.lower())
