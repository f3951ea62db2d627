"""Bad options are refused when the task is bound."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, Task
from celery.exceptions import ImproperlyConfigured

from celery_dflock import LockedTask, LockKeyError
from celery_dflock.options import OPTIONS, Backoff


def bind(name: str, **options: Any) -> Task:
    app = Celery("options", set_as_current=False)

    @app.task(base=LockedTask, name=name, shared=False, lazy=False, **options)
    def task(account: int, *, region: str = "eu") -> None: ...

    return task


def refusal(**options: Any) -> str:
    with pytest.raises(ImproperlyConfigured) as refused:
        bind("refused", **options)
    return str(refused.value)


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        (
            "lock_conflict",
            "queue",
            "one of requeue, skip, fail, supersede, newest (did you mean requeue?)",
        ),
        ("lock_conflict", None, "one of requeue, skip, fail"),
        ("lock_conflict", ["skip"], "one of requeue, skip, fail"),
        ("lock_group", "{nobody}", "{nobody} names no argument of the task"),
        ("lock_group", 7, "a template over the arguments"),
        ("lock_group", "a b", "contains white space or control characters"),
        ("lock_group_limit", 1, "a lock_group too"),
        ("lock_lost", "warning", "one of raise, warn (did you mean warn?)"),
        ("lock_ttl", 0, "whole seconds, 1 or more"),
        ("lock_timeout", -1, "seconds, 0 or more, or None"),
        ("lock_wait", "consumers", "one of slot, consumer (did you mean consumer?)"),
        ("lock_unique", "until_done", "one of until_executing, until_executed, until_expired"),
        ("lock_unique", "until_execute", "(did you mean until_executed?)"),
        ("lock_unique", True, "one of until_executing, until_executed, until_expired"),
        ("lock_unique", lambda *_: None, "one of until_executing, until_executed, until_expired"),
        ("lock_unique_ttl", 0, "whole seconds, 1 or more"),
        ("lock_unique_ttl", 0.5, "whole seconds, 1 or more"),
        ("lock_unique_ttl", None, "whole seconds, 1 or more"),
        ("lock_duplicate", "skipp", "one of coalesce, raise, skip, replace (did you mean skip?)"),
        ("lock_duplicate", None, "one of coalesce, raise, skip, replace"),
        ("lock_requeue", 5, "a dict of base, cap, max_wait, max_attempts"),
        ("lock_requeue", {"cap": -1}, "a number, 0 or more, for cap"),
        ("lock_requeue", {"base": "1"}, "a number, 0 or more, for base"),
        ("lock_requeue", {"max_attemps": 1}, "(did you mean max_attempts?)"),
        ("lock_requeue", {"cap": None}, "a number, 0 or more, for cap"),
        ("lock_requeue", {"hold": -1}, "a number, 0 or more, or None, for hold"),
        ("lock_key", 5, "a template over the arguments or a function (task, args, kwargs) -> key"),
        ("lock_key", "", "it is empty"),
        ("lock_key", [], "at least one key, or None for the task's name and arguments"),
        ("lock_key", "a\nb:{account}", "contains white space or control characters"),
        ("lock_key", "a b", "contains white space or control characters"),
        ("lock_key", "a\0b", "contains white space or control characters"),
        (
            "lock_key",
            "{nobody}",
            "{nobody} names no argument of the task (it has: account, region)",
        ),
        ("lock_key", "{}", "names no argument of the task (it has: account, region)"),
        ("lock_key", "{0}", "names no argument of the task (it has: account, region)"),
        ("lock_key", "{account", "expected '}'"),
        ("lock_key", "{account}{region}", "put a text between them"),
        ("lock_key", "{account}%{region}", "put a text between them, not %"),
        ("lock_key", "k" * 257, "its fixed text alone is over 256 bytes"),
        ("lock_key", "é" * 129, "its fixed text alone is over 256 bytes"),
    ],
)
def test_bad_option(option: str, value: object, remedy: str) -> None:
    text = refusal(**{option: value})

    assert text.startswith(f"task refused: {option}")
    assert repr(value) in text
    assert remedy in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("misspelled", "meant"),
    [
        ("lock_conflicts", "lock_conflict"),
        ("lock_time_out", "lock_timeout"),
        ("lock_tll", "lock_ttl"),
        ("lock_keys", "lock_key"),
        ("lock_on_lost", "lock_lost"),
        ("lock_uniqe", "lock_unique"),
        ("lock_unique_tll", "lock_unique_ttl"),
        ("lock_duplicates", "lock_duplicate"),
    ],
)
def test_misspelled_option(misspelled: str, meant: str) -> None:
    text = refusal(**{misspelled: 1})

    assert text == f"task refused: there is no option {misspelled}: did you mean {meant}?"


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_is_set_on_the_task_itself_is_refused(option: str) -> None:
    """Options are read from the class, once: it would have no effect, and nobody would know."""
    task = bind("set_later")
    with pytest.raises(ImproperlyConfigured) as refused:
        setattr(task, option, None)

    assert str(refused.value).startswith(f"task set_later: {option} is set too late")
    assert f"write @app.task(base=LockedTask, {option}=...)" in str(refused.value)
    assert option not in vars(task)


def test_an_option_that_a_class_sets_in_its_init_is_refused() -> None:
    class Import(LockedTask):
        def __init__(self) -> None:
            self.lock_key = "import"

    with pytest.raises(ImproperlyConfigured, match=r"^task Import: lock_key is set too late"):
        Import()


def test_other_attributes_of_a_task_are_set_as_ever() -> None:
    task = bind("others")
    task.rate_limit = "10/m"
    task.lock_of_mine = 3

    assert (task.rate_limit, task.lock_of_mine) == ("10/m", 3)


def test_replace_needs_an_end() -> None:
    text = refusal(lock_unique="until_expired", lock_duplicate="replace")

    assert text == (
        "task refused: lock_duplicate is 'replace': give another with until_expired: "
        "each would be sent"
    )


def test_a_call_with_a_bad_option_is_not_sent() -> None:
    task = bind("called")

    with pytest.raises(ImproperlyConfigured, match="task called: lock_unique is 'always'"):
        task.apply_async((1,), headers={"dflock": {"lock_unique": "always"}})


def test_own_attributes_are_no_options() -> None:
    assert bind("own.attribute", lock_colour="red").lock_colour == "red"


def test_good_options() -> None:
    options = bind(
        "good",
        lock_key="{account}:{region}",
        lock_ttl=1,
        lock_timeout=None,
        lock_conflict="skip",
        lock_lost="warn",
        lock_requeue={"cap": 2, "max_wait": 0},
    )._lock_options
    assert (options.ttl, options.timeout, options.conflict, options.lost) == (
        1,
        None,
        "skip",
        "warn",
    )
    assert options.requeue == Backoff(cap=2, max_wait=0)
    assert bind("fraction", lock_timeout=0.5)._lock_options.timeout == 0.5


def test_the_time_to_wait_that_nobody_has_chosen_depends_on_where() -> None:
    unchosen = bind("unchosen", lock_wait="consumer")._lock_options
    assert (unchosen.timeout, unchosen.queue_timeout) == (5, 1500)
    chosen = bind("chosen", lock_wait="consumer", lock_timeout=5)._lock_options
    assert (chosen.timeout, chosen.queue_timeout) == (5, 5)


def test_annotations_are_checked_too() -> None:
    annotated = Celery("annotated", set_as_current=False)
    annotated.conf.task_annotations = {"annotated": {"lock_ttl": "long"}}

    @annotated.task(base=LockedTask, name="annotated", shared=False)
    def task() -> None: ...

    with pytest.raises(ImproperlyConfigured, match="task annotated: lock_ttl is 'long'"):
        annotated.finalize()


def test_annotations_are_used() -> None:
    annotated = Celery("annotated", set_as_current=False)
    annotated.conf.task_annotations = {"annotated": {"lock_ttl": 7}, "*": {"lock_timeout": 0}}

    @annotated.task(base=LockedTask, name="annotated", shared=False)
    def task() -> None: ...

    annotated.finalize()
    assert annotated.tasks["annotated"]._lock_options.ttl == 7
    assert annotated.tasks["annotated"]._lock_options.timeout == 0


# The backoff of requeue.


def test_backoff_doubles_up_to_its_cap() -> None:
    backoff = Backoff(base=1, cap=30)
    assert [backoff.pause(n, 1.0) for n in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert backoff.pause(10**6, 0.5) == 15
    assert backoff.pause(3, 0.0) == 0


def test_backoff_ends() -> None:
    assert not Backoff(max_wait=0).is_over(10**6, 10**9)
    assert Backoff(max_wait=5).is_over(1, 5)
    assert not Backoff(max_wait=5).is_over(1, 4.9)
    assert Backoff(max_attempts=3).is_over(3, 0)
    assert not Backoff(max_attempts=3).is_over(2, 0)


# What a call can do wrong.


@pytest.mark.parametrize(
    "function", [lambda task, args, kwargs: None, lambda task, args, kwargs: ""], ids=["None", "''"]
)
def test_key_function_without_key(function: Any) -> None:
    task = bind("without.key", lock_key=function)

    with pytest.raises(LockKeyError, match="lock_key returned"):
        task.apply((1,), throw=True)


def test_template_does_not_fit_the_call() -> None:
    task = bind("no.fit", lock_key="{account.number}")

    with pytest.raises(LockKeyError, match=r"lock 'no\.fit' has no key: lock_key does not fit"):
        task.apply((1,), throw=True)


def test_arguments_that_make_no_json() -> None:
    task = bind("no.json")

    with pytest.raises(LockKeyError, match="set lock_key"):
        task.apply((object(),), throw=True)
