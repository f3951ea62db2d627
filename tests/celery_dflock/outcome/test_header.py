"""What the headers of a message say."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from celery.app.task import Context
from celery.exceptions import ImproperlyConfigured
from hypothesis import given
from hypothesis import strategies as st

from celery_dflock.outcome.header import (
    FIRING,
    HEADER,
    LARGEST_AGE,
    NOTHING,
    NUMBERS,
    RUN,
    Header,
    age_of,
    is_firing,
    said_of,
    unique_of,
)

options = st.dictionaries(
    st.sampled_from(["lock_timeout", "lock_limit", "lock_conflict"]), st.integers(0, 9), max_size=2
)
tickets = st.text("0123456789abcdef", min_size=1, max_size=64)
headers = st.builds(
    Header,
    options=options,
    unique=st.none() | st.just({"key": "k", "token": "t", "until": "u"}),
    attempt=st.integers(0, 99),
    since=st.none() | st.floats(1, 2e9),
    ticket=st.none() | tickets,
    redelivery=st.integers(0, 9),
    is_free=st.booleans(),
    ended=st.integers(0, 9),
    outage=st.integers(0, 99),
    paused=st.none() | st.floats(1, 2e9),
)


@given(header=headers, retries=st.integers(0, 3))
def test_what_is_written_is_read(header: Header, retries: int) -> None:
    said = {"x-tenant": "blue", FIRING: {"id": "1"}, HEADER: header.options}
    before = Context(id="1", headers={**said}, retries=retries)
    written = header.write(before)
    assert Header.read(Context(id="1", headers=written, retries=retries)) == header
    assert {**written, RUN: 0} == {**said, RUN: 0}
    assert before.headers == said, "that is another message"


@given(header=headers, retries=st.integers(0, 3))
def test_a_retry_counts_anew(header: Header, retries: int) -> None:
    before = Context(id="1", headers={HEADER: header.options}, retries=retries)
    again = Header.read(Context(id="1", headers=header.write(before), retries=retries + 1))
    assert again == Header(header.options, header.unique)


@given(header=headers, age=st.integers(0, 9))
def test_a_task_that_was_sent_with_the_headers_of_another_counts_anew(
    header: Header, age: int
) -> None:
    """It has met no conflict, no run of its own was under way, and the place is not its own."""
    written = header.write(Context(id="parent", headers={HEADER: header.options}, retries=0))
    if age:
        written = said_of("child", written, "age", age)
    child = Header.read(Context(id="child", headers=written, retries=0))
    assert child == Header(header.options, age=age)
    own = Header.read(Context(id="parent", headers=written, retries=0))
    assert age or own == header


def test_most_messages_say_nothing() -> None:
    for message in (None, {}, {"x-tenant": "blue"}):
        assert Header.read(Context(headers=message)) is NOTHING


def test_what_does_not_count_is_left_out_of_the_time() -> None:
    header = Header({}, attempt=1, since=100.0, paused=130.0)
    assert header.since_at(150.0) == 120.0
    assert header.since_at(120.0) == 100.0, "clocks differ"
    assert Header({}, attempt=1, since=100.0).since_at(150.0) == 100.0
    assert Header({}, paused=130.0).since_at(150.0) is None


def nonsense() -> Any:
    bad: list[Any] = ["x", math.nan, math.inf, 10**400, -7, [1]]
    for value in ("text", [1], 5, True):
        yield f"{HEADER}={value!r}", {HEADER: value}
        yield f"{RUN}={value!r}", {RUN: value}
    for name, value in itertools.product(NUMBERS, bad):
        yield f"{name}={value!r:.9}", {RUN: {"id": "1", name: value, "retries": 0}}
    for value in (5, "a\nb", "a b", 257 * "a", ["a"]):
        yield f"ticket={value!r:.9}", {RUN: {"id": "1", "ticket": value, "retries": 0}}


NONSENSE = dict(nonsense())


@pytest.mark.parametrize("headers", list(NONSENSE.values()), ids=list(NONSENSE))
def test_nonsense_is_refused_in_one_line_that_names_the_header(headers: dict[str, Any]) -> None:
    with pytest.raises(
        ImproperlyConfigured, match=r"^the message header dflock(_run)? .*\Z"
    ) as bad:
        Header.read(Context(id="1", headers=headers, retries=0))
    assert "\n" not in str(bad.value)
    assert len(str(bad.value)) < 300


@pytest.mark.parametrize(
    "ours", ["text", {"unique": "x"}, {"unique": {"key": "k", "token": 5, "until": "u"}}]
)
def test_what_is_no_lock_of_a_sender_is_none(ours: Any) -> None:
    """Nobody is there to be told where a task is revoked."""
    said = {"id": "1", **ours} if isinstance(ours, dict) else ours
    assert unique_of(Context(id="1", headers={RUN: said})) is None


def test_what_a_sender_has_locked_is_its_own_tasks() -> None:
    ours = {"key": "k", "token": "t", "until": "u"}
    for task, headers, found in (
        ("1", said_of("1", {}, "unique", ours), ours),
        ("2", said_of("1", {}, "unique", ours), None),
        *(
            ("1", said_of("1", {}, "unique", {**ours, name: ""}), None)
            for name in ("key", "token", "until")
        ),
        ("1", {}, None),
        ("1", None, None),
    ):
        assert unique_of(Context(id=task, headers=headers)) == found


@pytest.mark.parametrize(
    "headers", [None, {}, {"x": 1}, {RUN: {"id": "1", "outage": 2}, "x": 1}, {RUN: "bad"}]
)
def test_an_age_is_its_own_tasks(headers: dict[str, Any] | None) -> None:
    assert age_of(headers, "1") == 0
    for age, read in ((1, 1), (LARGEST_AGE, LARGEST_AGE), (LARGEST_AGE + 1, 0), (0, 0), (-1, 0)):
        aged = said_of("1", headers, "age", age)
        assert age_of(aged, "1") == read
        assert age_of(aged, "2") == 0
        assert {**aged, RUN: 0} == {**(headers or {}), RUN: 0}
        more = (headers or {}).get(RUN)
        if more != "bad":
            assert {**aged[RUN], **(more or {})} == aged[RUN]
            assert Header.read(Context(id="1", headers=aged, retries=None)).age == read
    assert age_of({RUN: {"age": "7", "id": "1"}}, "1") == 0


def test_a_firing_is_its_own_tasks() -> None:
    firing = {FIRING: {"id": "1"}}
    assert is_firing(Context(id="1", headers=firing))
    assert not is_firing(Context(id="2", headers=firing))
    assert not is_firing(Context(id="1", headers={FIRING: "1"}))
    assert not is_firing(Context(id="1", headers={"x-tenant": "blue"}))
    assert not is_firing(Context(id="1", headers=None))


@pytest.mark.parametrize(
    ("headers", "line"),
    [
        (
            {HEADER: "x"},
            "dflock is 'x': give a dict of options of the task, such as {'lock_timeout': 60}",
        ),
        ({RUN: "x"}, "dflock_run is 'x': give a dict of what the plugin has written there"),
        (
            {RUN: {"id": "1", "ticket": "a b", "retries": 0}},
            "dflock_run has ticket 'a b', not a ticket of a lock server: leave it to the plugin",
        ),
    ],
)
def test_a_header_that_is_wrong_is_named_with_what_to_send(
    headers: dict[str, Any], line: str
) -> None:
    with pytest.raises(ImproperlyConfigured) as bad:
        Header.read(Context(id="1", headers=headers, retries=0))
    assert str(bad.value) == f"the message header {line}"
