"""How `LockedTask` works together with other base classes of tasks."""

from __future__ import annotations

import dis
import functools
import inspect
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

from celery import Task
from celery.exceptions import ImproperlyConfigured

ENTERED = "_dflock_entered"
"""Set on a request once its task has been called under a lock, or tried to be."""

_UNKNOWN = object()


def check(task: type[Task], locked: type[Task]) -> None:
    """Refuse a task that would never ask for its lock, and watch one for which that is uncertain.

    A base class with its own ``__call__``, such as Flask's ``ContextTask``, runs the body. If it is
    in front of `locked`, it runs it without the lock, unless it calls the next ``__call__``.

    Raises:
        ImproperlyConfigured: one line that says how to order the bases.
    """
    in_front = task.__mro__[: task.__mro__.index(locked)]
    callers = [cls for cls in in_front if callable(vars(cls).get("__call__"))]
    for cls in callers:
        how = _way_past(vars(cls)["__call__"], task, locked)
        if how is not None:
            raise ImproperlyConfigured(
                f"task {task.name}: {cls.__name__}.__call__ runs the task before"
                f" {locked.__name__} can lock it: {_remedy(cls, locked)} instead of {how}"
            )
    if callers and not is_of_celery(task):
        _watch(task, callers[-1], locked)


def is_of_celery(task: type[Task]) -> bool:
    """Whether it is one of Celery's own tasks, which also get the app's default base."""
    return task.__module__.startswith("celery.")


def _remedy(cls: type, locked: type[Task]) -> str:
    first, name = locked.__name__, cls.__name__
    return (
        f"put {first} first, class ...({first}, {name}), or let {name} call"
        " super().__call__(*args, **kwargs)"
    )


def _watch(task: type[Task], cls: type, locked: type[Task]) -> None:
    """Make the body of a task raise if a worker reaches it without the lock."""
    run = inspect.getattr_static(task, "run")
    body = run.__func__ if isinstance(run, staticmethod) else run
    why = (
        f"task {task.name}: {cls.__name__}.__call__ bypassed {locked.__name__}.__call__,"
        f" so the task has no lock: {_remedy(cls, locked)}"
    )

    @functools.wraps(body)
    def watched(*args: Any, **kwargs: Any) -> Any:
        # A base may have pushed a request of its own, as Task.__call__ does.
        requests = [each for each in task.request_stack.stack if not each.called_directly]
        if requests and not getattr(requests[-1], ENTERED, False):
            raise ImproperlyConfigured(why)
        return body(*args, **kwargs)

    task.run = staticmethod(watched) if isinstance(run, staticmethod) else watched


def _way_past(call: Any, task: type[Task], locked: type[Task]) -> str | None:
    """Return how a ``__call__`` runs the body without reaching `locked`, if that is certain."""
    names, owners = set[str](), list[Any]()
    for code, space in _codes(inspect.unwrap(call), 0):
        names.update(code.co_names)
        owners += _called(code, space)
    if "__call__" not in names:
        return "self.run(*args, **kwargs)" if "run" in names else None
    behind = task.__mro__[task.__mro__.index(locked) + 1 :]
    for owner in owners:
        bases = owner.__mro__ if isinstance(owner, type) else ()
        if next((cls for cls in bases if "__call__" in vars(cls)), None) not in behind:
            return None
    return f"{owners[0].__name__}.__call__(self, *args, **kwargs)" if owners else None


def _called(code: CodeType, space: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the object of each ``.__call__`` in a code, or a marker if it is unknown."""
    path: list[str] = []
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name in ("LOAD_GLOBAL", "LOAD_DEREF"):
            path = [value]
        elif name in ("LOAD_ATTR", "LOAD_METHOD") and value != "__call__":
            path = path and [*path, value]
        elif value == "__call__":  # of whatever instruction: some are of super alone
            yield _found(path, space)
        elif name != "EXTENDED_ARG":
            path = []


def _found(path: list[str], space: Mapping[str, Any]) -> Any:
    try:
        return functools.reduce(getattr, path[1:], space[path[0]])
    except Exception:  # a proxy may raise what it wants, outside of its context
        return _UNKNOWN


def _codes(function: Any, depth: int) -> Iterator[tuple[CodeType, Mapping[str, Any]]]:
    """Yield the codes of a function, its inner functions and its closure, with the names they know."""
    if not isinstance(function, FunctionType) or depth > 5:
        return
    known: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            known[name] = cell.cell_contents
    space = ChainMap(known, function.__globals__)
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        yield code, space
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for inner in known.values():
        yield from _codes(inner, depth + 1)
