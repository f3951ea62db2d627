"""Decorated tasks: what a call gives for an argument is what the function gets for it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, Task
from celery.exceptions import ImproperlyConfigured

from celery_dflock import LockedTask
from celery_dflock.signatures import signature

app = Celery("signatures", set_as_current=False)
connection = object()


def sync(account_id: int, force: bool = False) -> int:
    return account_id


def sync_with(database: object, account_id: int, force: bool = False) -> int:
    return account_id


def bound_sync(self: Task, account_id: int, force: bool = False) -> int:
    return account_id


# Those that hand on what they are given.


@contextlib.contextmanager
def as_context() -> Any:
    yield


def plain(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        print(function.__name__, args, kwargs)
        return function(*args, **kwargs)

    return inner


def with_other_calls(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*given: Any, **named: Any) -> Any:
        key = "{} {}".format(function, *given) + str(dict(**named))
        try:
            return function(*given, **named)
        finally:
            print(key)

    return inner


def in_a_closure(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return (lambda: function(*args, **kwargs))()

    return inner


def bound(function: Any) -> Any:
    @functools.wraps(function)
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return inner


def first_by_name(function: Any) -> Any:
    @functools.wraps(function)
    def inner(first: Any, *args: Any, **kwargs: Any) -> Any:
        return function(first, *args, **kwargs)

    return inner


class Polite:
    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def cached(function: Any) -> Any:
    return plain(functools.cache(function))


def has_others_call(function: Any) -> Any:
    """As tenacity does."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        call = lambda function, *args, **kwargs: function(*args, **kwargs)  # noqa: E731
        return call(function, *args, **kwargs)

    return inner


def calls_what_calls(function: Any) -> Any:
    """As pydantic's validate_call does."""
    validated = plain(function)

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return validated(*args, **kwargs)

    return inner


def by_name(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, dry: bool = False, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, "database": connection})

    return inner


HAND_ON = [
    *(plain, has_others_call, calls_what_calls),
    *(with_other_calls, in_a_closure, first_by_name, Polite, as_context(), cached),
]


# Those that do not, and say what they take.


def explicit(function: Any) -> Any:
    @functools.wraps(function)
    def inner(account_id: int, force: bool = False) -> Any:
        return function(connection, account_id, force)

    return inner


def declared(function: Any) -> Any:
    inner = injects(function)
    inner.__signature__ = inspect.signature(sync)
    return inner


def partial(function: Any) -> Any:
    # Celery itself takes only functions, and objects of a class with a __call__.
    return plain(functools.update_wrapper(functools.partial(function, connection), function))


DECLARE = [explicit, declared, partial]


# Those that do not, and hide it.


def injects(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(connection, *args, **kwargs)

    return inner


def injects_before(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        args = (connection, *args)
        return function(*args, **kwargs)

    return inner


def calls_with_some(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(connection, args[0])

    return inner


def takes_one_away(function: Any) -> Any:
    @functools.wraps(function)
    def inner(account_id: int, *args: Any, **kwargs: Any) -> Any:
        return function(connection, account_id + 1, *args, **kwargs)

    return inner


def injects_and_calls_others(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        print(str.format("{}", *args, **kwargs), sync(*args, **kwargs))
        return function(connection, *args, **kwargs)

    return inner


def injects_in_a_closure(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        def another(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return another(connection, *args, **kwargs)

    return inner


class Injects(Polite):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(connection, *args, **kwargs)


HIDE = [
    injects,
    injects_before,
    calls_with_some,
    injects_and_calls_others,
    injects_in_a_closure,
    Injects,
]


def add(function: Callable[..., Any], **options: Any) -> Task:
    function.__name__ = f"task_{len(app.tasks)}"
    return app.task(base=LockedTask, shared=False, lazy=False, **options)(function)


def keys(task: Task, *args: Any, **kwargs: Any) -> list[str]:
    return task._lock_options.keys_of(task, args, kwargs)


@pytest.mark.parametrize("around", [*HAND_ON, *DECLARE])
def test_the_lock_is_that_of_the_argument(around: Any) -> None:
    function = around(sync_with if around in DECLARE else sync)
    task = add(function, lock_key="account:{account_id}:{force}")

    assert function(7, True) == 7
    assert keys(task, 7, True) == keys(task, account_id=7, force=True) == ["account:7:True"]
    assert keys(task, 8) == ["account:8:False"]


def test_with_the_task_as_first_argument() -> None:
    task = add(bound(plain(bound_sync)), bind=True, lock_key="account:{account_id}")
    assert keys(task, 7, True) == ["account:7"]


def test_an_argument_that_is_injected_by_name() -> None:
    def function(account_id: int, force: bool = False, database: object = None) -> None: ...

    assert keys(add(by_name(function), lock_key="account:{account_id}"), 7, True) == ["account:7"]


def test_a_parameter_in_front_of_others() -> None:
    """It can be named; those behind it cannot."""
    task = add(takes_one_away(sync_with), lock_key="account:{account_id}")
    assert keys(task, 7, True) == keys(task, force=True, account_id=7) == ["account:7"]
    with pytest.raises(ImproperlyConfigured, match="force} cannot be found"):
        add(takes_one_away(sync_with), lock_key="account:{account_id}:{force}")


def test_several_decorators() -> None:
    task = add(plain(explicit(plain(sync_with))), lock_key="account:{account_id}")
    assert keys(task, 7, True) == ["account:7"]
    with pytest.raises(ImproperlyConfigured, match="cannot be found"):
        add(plain(injects(plain(sync_with))), lock_key="account:{account_id}")


@pytest.mark.parametrize("around", HIDE)
def test_what_cannot_be_told_is_refused(around: Any) -> None:
    function = around(sync_with)
    assert function(7, True) == 7

    with pytest.raises(ImproperlyConfigured) as refused:
        add(function, lock_key="account:{account_id}")

    wrapper = "Injects" if around is Injects else f"{around.__name__}.<locals>.inner"
    assert str(refused.value).partition(": ")[2] == (
        "lock_key 'account:{account_id}': {account_id} cannot be found among the arguments of a call: "
        f"the decorator {wrapper} takes *args and does not hand them on as they are: name its "
        "parameters, or set its __signature__, or give (task, args, kwargs) -> key"
    )


@pytest.mark.parametrize("around", HIDE)
def test_other_keys_are_not_refused(around: Any) -> None:
    """Neither one without fields, nor a function, nor none: then all arguments are the key."""
    assert keys(add(around(sync_with), lock_key="accounts"), 7, True) == ["accounts"]
    by_function = add(around(sync_with), lock_key=lambda task, args, kwargs: f"account:{args[0]}")
    assert keys(by_function, 7, True) == ["account:7"]
    task = add(around(sync_with))
    assert keys(task, 7) != keys(task, 8), "and the call fits: it is not bound to what is wrapped"
    assert keys(task, 7, True) != keys(task, 7)


def test_as_celery_checks_it() -> None:
    """Where Celery refuses a call, so does the signature."""
    for around in DECLARE[:2]:
        task = add(around(sync_with))
        with pytest.raises(TypeError):
            task.__header__(7, True, 9)
        with pytest.raises(TypeError):
            signature(type(task).run).bind(7, True, 9)


def test_arguments_of_an_open_function() -> None:
    def function(*args: Any, **kwargs: Any) -> None: ...

    task = add(function, bind=True, lock_key="account:{account_id}")
    assert keys(task, 1, account_id=7) == ["account:7"]
