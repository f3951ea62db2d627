"""How `LockedTask` goes together with other base classes of tasks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from celery import Task
from celery.exceptions import ImproperlyConfigured


def check(task: type[Task], locked: type[Task]) -> None:
    """Refuse a task whose lock would never be asked for.

    A base class with a ``__call__`` of its own, such as Flask's ``ContextTask``, runs the body. In
    front of `locked` it does so without the lock, unless it hands on to the next ``__call__``.

    Raises:
        ImproperlyConfigured: one line that says how to order the bases.
    """
    for cls in task.__mro__:
        if cls is locked:
            return
        if _runs_the_body(vars(cls).get("__call__")):
            name = locked.__name__
            raise ImproperlyConfigured(
                f"task {task.name}: {cls.__name__}.__call__ runs the task before {name} can lock it:"
                f" put {name} first, class ...({name}, {cls.__name__}), or let {cls.__name__} call"
                " super().__call__(*args, **kwargs) instead of self.run(*args, **kwargs)"
            )


def is_of_celery(task: type[Task]) -> bool:
    """Whether it is one of Celery's own tasks, which get the app's default base as well."""
    return task.__module__.startswith("celery.")


def _runs_the_body(call: object) -> bool:
    if not callable(call):
        return False
    names = set(_names(inspect.unwrap(call), 0))
    return "run" in names and "__call__" not in names


def _names(function: object, depth: int) -> Iterator[str]:
    """Yield the names that a function uses, those of functions inside of it and in its closure too."""
    if not isinstance(function, FunctionType) or depth > 5:
        return
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        yield from code.co_names
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for cell in function.__closure__ or ():
        try:
            inner = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield from _names(inner, depth + 1)
