"""Properties of lock keys: the same call gives the same key everywhere, and never a bad one."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, IntEnum
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from celery import Celery, Task
from celery.exceptions import ImproperlyConfigured
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kombu.utils import json

from celery_dflock import LockedTask, LockKey, LockNotAcquiredError, Skipped, dflock
from celery_dflock.keys import KeyTemplate, Parameters, encode, finish, finished, join
from celery_dflock.locks import Locks
from dflockd.sync_client import DistributedLock

app = Celery("keys", set_as_current=False)

texts = st.text(st.characters(exclude_categories=[]))  # surrogates too
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def locked(function: Callable[..., Any], name: str, **options: Any) -> Task:
    return app.task(base=LockedTask, name=name, shared=False, lazy=False, **options)(function)


def key_of(task: Task, *args: Any, **kwargs: Any) -> str:
    [key] = task._lock_options.keys_of(task, args, kwargs)
    return finish(key)


def _plain(a: Any, b: Any = 2, *, c: Any = None) -> None: ...


def _bound(self: Task, a: Any, b: Any = 2, *, c: Any = None) -> None: ...


def _open(a: Any, *more: Any, **named: Any) -> None: ...


plain = locked(_plain, "plain")
bound = locked(_bound, "bound", bind=True)
spread = locked(_open, "spread")
template = locked(_plain, "template", lock_key="t:{a}:{b}")
single = locked(_plain, "only", lock_key="t:{a}")
bound_template = locked(_bound, "bound.template", lock_key="t:{a}:{b}", bind=True)
computed = locked(_plain, "computed", lock_key=lambda task, args, kwargs: f"{task.name} {args[0]}")


@given(values, values, values)
def test_positional_or_named_is_no_matter(a: Any, b: Any, c: Any) -> None:
    for task in (plain, bound, template, bound_template):
        key = key_of(task, a, b, c=c)
        assert key_of(task, a, b=b, c=c) == key
        assert key_of(task, c=c, b=b, a=a) == key


@given(values)
def test_defaults_count(a: Any) -> None:
    for task in (plain, bound, template, bound_template):
        assert key_of(task, a) == key_of(task, a, 2, c=None)
    assert key_of(plain, a) != key_of(plain, a, 3)


def test_self_is_no_argument() -> None:
    assert key_of(bound, 1).partition(":")[2] == key_of(plain, 1).partition(":")[2]
    assert key_of(bound_template, 1) == "t:1:2"


@given(st.dictionaries(st.text(), values, min_size=2))
def test_order_in_a_dict_is_no_matter(value: dict[str, Any]) -> None:
    turned = dict(reversed(value.items()))
    assert key_of(plain, value) == key_of(plain, turned)
    assert key_of(spread, 1, x=1, y=value) == key_of(spread, 1, y=turned, x=1)


class Region(str, Enum):  # noqa: UP042 - the text of a StrEnum is its value
    EU = "eu"


class Size(IntEnum):
    ONE = 1


@given(values)
@example((1, (2, 3)))
@example(Region.EU)
@example([Region.EU, Size.ONE])
@example({2: True, 10: None})
@example(UUID(int=7))
@example(datetime(2024, 2, 29, 1, 2, 3, 4, UTC))
@example(date(2024, 2, 29))
@example(Decimal("1.10"))
def test_the_same_after_the_journey(value: Any) -> None:
    """In the publisher, and in the worker that has read the message."""
    args, kwargs = json.loads(json.dumps([[value], {"c": value}]))
    for task in plain, template, single:
        assert key_of(task, *args, **kwargs) == key_of(task, value, c=value)


@given(values, values)
def test_different_arguments_have_different_keys(one: Any, other: Any) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (key_of(plain, one) == key_of(plain, other)) == same
    assert key_of(plain, one) != key_of(bound, one)


def test_positional_only_and_named_alike() -> None:
    """``f(1, a=2)`` is a call in which `a` is two things."""

    def function(a: int, /, **named: int) -> None: ...

    task = locked(function, "alike")
    assert key_of(task, 1, a=2) != key_of(task, 5, a=2)
    assert key_of(task, 1, a=2) != key_of(task, 1, a=3)
    assert key_of(locked(function, "alike.t", lock_key="{a}:{b}"), 1, a=2, b=3) == "1:3"


@given(
    st.sampled_from(
        [
            lambda: None,
            lambda a, b=2: None,
            lambda a, b=2, *, c: None,
            lambda *, a, b=1: None,
            lambda a, /, b: None,
            lambda a, *more, b=1: None,
            lambda a, /, **named: None,
        ]
    ),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.sampled_from(["a", "b", "c", "more", "named"]), st.integers(), max_size=3),
)
@example(lambda a, *more: None, [1], {"more": 2})
@example(lambda a, **named: None, [1], {"named": 2})
@example(lambda a, /: None, [], {"a": 1})
def test_arguments_are_bound_as_python_does(
    function: Callable[..., None], args: list[int], kwargs: dict[str, int]
) -> None:
    signature = inspect.signature(function)

    def by_python() -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def outcome(bind: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
        try:
            return bind()
        except TypeError as exc:
            return str(exc)

    assert outcome(lambda: Parameters(signature).bind(args, kwargs)) == outcome(by_python)


# What is in a key.


@given(texts)
@example("a\nr\nb")
@example("\0")
@example("\u2028\u00a0\u3000\ufeff")
@example("\ud800")
@example("x" * 10_000)
@example("é" * 200)
@example("{b}")
@example("%0A")
def test_any_text_makes_a_key_that_can_be_sent(text: str) -> None:
    for key in (key_of(plain, text), key_of(template, text), key_of(computed, text)):
        assert DistributedLock(key).key == key
        assert len(key.encode()) <= 256
        assert not any(char.isspace() or ord(char) < 32 for char in key)


@given(texts, texts)
@example("a b", "a%20b")
@example("a\nb", "a%0Ab")
@example("\ud800", "\\ud800")
@example("x" * 300, "x" * 301)
@example("x" * 300 + "a", "x" * 300 + "b")
@example("x" * 300, key_of(computed, "x" * 300))
def test_different_texts_have_different_keys(one: str, other: str) -> None:
    for task in (template, computed):
        assert (key_of(task, one) == key_of(task, other)) == (one == other)


@pytest.mark.parametrize("char", ["x", "é", "語", "🙂"])
def test_a_cut_key_is_nobody_elses_whole_key(char: str) -> None:
    for length in range(60, 300):
        cut = finish(char * length + "y" * (length % 7))
        if "~" in cut:
            assert finish(str(cut)) != cut


def test_any_argument_text_is_taken_by_the_server(lock_server: Any) -> None:
    for text in ("a\nr\nb", "\0", "\u2028", "\ud800", "x" * 10_000, "é" * 200, "", "🙂"):
        lock = DistributedLock(key_of(template, text), 0, 5, [lock_server.address])
        with lock:
            assert lock.held


def test_readable_as_long_as_it_fits() -> None:
    assert key_of(template, 7, "eu") == "t:7:eu"
    assert key_of(template, "größe/🙂") == "t:größe/🙂:2"
    assert key_of(computed, 7) == "computed%207"
    long = key_of(template, "x" * 300)
    assert long.startswith("t:xxxx")
    assert len(long) == 256


@given(st.text(max_size=300), st.text(max_size=300))
def test_the_prefix_is_part_of_it(one: str, other: str) -> None:
    assert finish(encode(one), "app:") != finish(encode(other), "other:")
    assert len(finish(encode(one), "app:").encode()) <= 256


@pytest.mark.parametrize(
    ("text", "arguments", "key"),
    [
        ("{order.real}", {"order": 3}, "3"),
        ("{order[id]}", {"order": {"id": 4}}, "4"),
        ("{order:03}", {"order": 5}, "005"),
        ("{order!r}", {"order": "a b"}, "'a%20b'"),
        ("{{{order}}}", {"order": 1}, "{1}"),
        ("{order}/{order}", {"order": "{a b}"}, "{a%20b}/{a%20b}"),
        ("{order}/{order!s:>3}", {"order": "b"}, "b/%20%20b"),
        ("{order:>{width}}", {"order": "b", "width": 3}, "%20%20b"),
        ("{order!r}/{width}", {"order": "a/b", "width": 3}, "'a%2Fb'/3"),
    ],
)
def test_fields_of_a_template(text: str, arguments: dict[str, Any], key: str) -> None:
    signature = inspect.signature(lambda order, width=1: None)
    assert KeyTemplate(text, signature).render(arguments) == key


# Other values, another key.

literals = st.text(st.sampled_from(":/-&%2A5é{}"), max_size=3)
contained = st.text(st.sampled_from(":/-&%2A5é{} \n\ud800x"), max_size=5)


@st.composite
def templates(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A template over the arguments v0, v1, ..., and its fields."""
    between = draw(st.lists(literals.filter(lambda each: each[:1] not in ("", "%")), max_size=3))
    spec = st.sampled_from(["", "!s", ":>3"])
    fields = [f"{{v{number}{draw(spec)}}}" for number in range(len(between) + 1)]
    fixed = [each.replace("{", "{{").replace("}", "}}") for each in [draw(literals), *between]]
    text = "".join(before + field for before, field in zip(fixed, fields, strict=True))
    return text + draw(st.sampled_from(["", "%", ":"])), fields


def of_values(count: int) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(f"v{number}", kind) for number in range(count)])


def arguments(*values: str) -> dict[str, str]:
    return {f"v{number}": value for number, value in enumerate(values)}


cases = st.tuples(templates(), st.lists(contained, min_size=4, max_size=4), st.data())


@settings(max_examples=150)
@given(cases)
def test_other_values_make_another_key(case: Any) -> None:
    assert_another_key(*case)


@pytest.mark.soak
@settings(max_examples=3000)
@given(cases)
def test_other_values_make_another_key_however_they_are_cut(case: Any) -> None:
    assert_another_key(*case)


def assert_another_key(
    template: tuple[str, list[str]], values: list[str], data: st.DataObject
) -> None:
    text, fields = template
    one = values[: len(fields)]
    # Of the same characters, divided in another way: what random values rarely are.
    together, cut = "".join(one), st.integers(0, len("".join(one)))
    cuts = sorted(data.draw(st.lists(cut, min_size=len(fields) - 1, max_size=len(fields) - 1)))
    other = [together[start:end] for start, end in pairwise([0, *cuts, len(together)])]
    make = KeyTemplate(text, of_values(len(fields))).render

    def filled(values: list[str]) -> list[str]:
        return [field.format(**arguments(*values)) for field in fields]

    for changed in (other, [encode(value) for value in one]):
        is_same = filled(one) == filled(changed)
        assert (make(arguments(*one)) == make(arguments(*changed))) == is_same


@pytest.mark.parametrize(
    ("text", "one", "other"),
    [
        ("{v0}:{v1}", ("1:2", "3"), ("1", "2:3")),
        ("{v0}::{v1}", ("1:", "3"), ("1", ":3")),
        ("{v0}::{v1}", ("1::2", "3"), ("1", "2::3")),
        ("{v0}:%20{v1}", ("x: y", "z"), ("x", "y: z")),
        ("{v0}2{v1}", (" ", "x"), ("%", "0x")),
        ("{v0}é{v1}", ("1é2", "3"), ("1", "2é3")),
        ("{v0}{{{v1}", ("1{2", "3"), ("1", "2{3")),
    ],
)
def test_values_that_contain_what_is_between(text: str, one: Any, other: Any) -> None:
    template = KeyTemplate(text, of_values(2))
    assert template.render(arguments(*one)) != template.render(arguments(*other))


@pytest.mark.parametrize(
    ("text", "values", "key"),
    [
        ("account:{v0}", ("1:2",), "account:1:2"),
        ("{v0}:{v1}", ("eu", "1:2"), "eu:1:2"),
        ("{v0}:{v1}", ("1:2", "3"), "1%3A2:3"),
        ("{v0}::{v1}", ("1:2", "3"), "1:2::3"),
        ("{v0}-{v1}", ("größe", "a b"), "größe-a%20b"),
        ("50%:{v0}%{{", ("1",), "50%:1%{"),
    ],
)
def test_a_value_is_encoded_where_it_must_be(text: str, values: Any, key: str) -> None:
    """All others make the key that they made in 0.1, whose workers may be there as well."""
    assert KeyTemplate(text, of_values(len(values))).render(arguments(*values)) == key


@given(st.lists(contained, min_size=1, max_size=3), st.lists(contained, min_size=1, max_size=3))
@example(["a&b"], ["a", "b"])
@example(["a%26b"], ["a&b"])
@example(["a%2526b"], ["a%26b"])
@example(["a%", "b"], ["a%&b"])
def test_a_text_for_several_keys(one: list[str], other: list[str]) -> None:
    assert (join(one) == join(other)) == (one == other)


class Unspeakable:
    def __format__(self, spec: str) -> str:
        raise ValueError("it has no text")


def _many(a: Any, *b: Any, c: Any = 3) -> None: ...


only = [
    locked(function, f"only.{number}.{text}", lock_key=text, bind=function is _bound)
    for number, function in enumerate((_plain, _bound, _many))
    for text in ("{a}", "t:{b}", "{c}:end", "{a!r}", "{a}{{}}", "50%:{a}", "{a:>3}", "{a.real}")
]
calls = st.tuples(
    st.lists(values | texts | st.builds(Unspeakable), max_size=4).map(tuple),
    st.dictionaries(st.sampled_from("abcd"), values, max_size=2),
)


def outcome(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as exc:
        return type(exc), str(exc)


@given(st.sampled_from(only), calls)
def test_a_key_of_one_argument_is_made_as_all_keys_are(
    task: Task, call: tuple[tuple[Any, ...], dict[str, Any]]
) -> None:
    made = outcome(lambda: task._bound().keys_of(task, *call))
    assert made == outcome(lambda: [finish(key) for key in task._lock_options.keys_of(task, *call)])


def test_most_keys_are_of_one_argument() -> None:
    is_quick = {task.lock_key: task._lock_options.only_key() is not None for task in only}
    assert is_quick.pop("{a!r}") is is_quick.pop("{a:>3}") is is_quick.pop("{a.real}") is False
    assert all(is_quick.values())
    assert template._lock_options.only_key() is None
    assert locked(_open, "open.one", lock_key="{a}")._lock_options.only_key() is None


def names(key: str, proj: Celery) -> list[str]:
    """The keys that a block asks for."""
    return dflock(key, app=proj)._make(Locks)[0].keys


@pytest.mark.parametrize(
    "key",
    [
        None,
        "{a}:{b}",
        ["{a}:{b}", "z:{b}"],
        lambda task, args, kwargs: [f"{args[0]}", f"%{args[1]}"],
        lambda task, args, kwargs: plain.lock_keys(*args),
    ],
    ids=["default", "template", "several", "function", "of another"],
)
@given(a=st.text(), b=st.text(), prefix=st.sampled_from(["", "shop:", "50%:", "p" * 200]))
@example(a="eu:west", b="7", prefix="")
@example(a="eu%3Awest", b="7 ", prefix="shop:")
@example(a="\u8a9e" * 100, b="%", prefix="shop:")
def test_a_block_takes_the_keys_of_a_call_as_they_are(
    key: Any, a: str, b: str, prefix: str
) -> None:
    proj = Celery("prefixed", set_as_current=False)
    proj.conf.dflock_key_prefix = prefix
    a, b = a or "a", b or "b"
    task = proj.task(base=LockedTask, name="call", shared=False, lazy=False, lock_key=key)(_plain)
    made = task.lock_keys(a, b)
    # What a run takes.
    assert made == task._bound().keys_of(task, (a, b), {}) == sorted(set(made))
    for each in made:
        assert type(each) is LockKey
        assert names(each, proj) == [each]
        assert pickle.loads(pickle.dumps(each)) == each
        assert type(pickle.loads(pickle.dumps(each))) is LockKey
        assert names(LockKey(json.loads(json.dumps(each))), proj) == [each]
        assert names(LockNotAcquiredError(str(each), "why").key, proj) == [each]
        assert names(Skipped(str(each), "id").key, proj) == [each]
        assert finish(finished(each, "other:"), "other:") is each


def test_a_finished_key_is_a_lock_key_too() -> None:
    [key] = template.lock_keys("1:%", 2)
    other = locked(_plain, "of.a.key", lock_key=LockKey(key + "{}"))
    assert other.lock_keys(1) == [f"{key}{{}}"]


def test_lock_keys_is_no_option() -> None:
    with pytest.raises(ImproperlyConfigured, match="there is no option lock_keys: did you mean"):
        locked(_plain, "mistaken", lock_keys=["a"])
