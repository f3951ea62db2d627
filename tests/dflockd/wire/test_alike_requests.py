"""Requests of runs that are alike are read by a shorter way, which must say the same."""

from __future__ import annotations

from inspect import signature

from hypothesis import given
from hypothesis import strategies as st

from dflockd.wire import arguments
from dflockd.wire.arguments import Asked, MalformedError

general = arguments._by_name(
    *(*arguments._SLOT, *arguments._RESERVE, b"timeout"), needed=b"timeout"
)

NAMES = [*signature(Asked).parameters, "token", "how"]

FIELDS = [
    *(
        b"timeout=10",
        b"timeout=0",
        b"timeout=",
        b"lease=30",
        b"lease=0",
        b"limit=3",
        b"rate=2/1000",
    ),
    *(
        b"group=g",
        b"group-limit=2",
        b"weight=2",
        b"owner=run",
        b"owner=",
        b"attempt=0",
        b"attempt=x",
        b"age=7",
    ),
    *(
        b"ticket=abc",
        b"away=1",
        b"hold=1",
        b"label=me",
        b"label=",
        b"label=a owner=b",
        b"",
        b"what=1",
    ),
]
ends = st.sampled_from([b"", b" owner=run attempt=0 label=me", b" owner=r attempt=1 label="])


def said(read: object, argument: bytes) -> object:
    try:
        asked = read(argument)  # type: ignore[operator]
    except MalformedError:
        return "malformed"
    return [getattr(asked, name) for name in NAMES]


@given(st.lists(st.lists(st.sampled_from(FIELDS), max_size=5), max_size=6), ends)
def test_it_reads_what_the_long_way_does(drawn: list[list[bytes]], end: bytes) -> None:
    read = arguments._of_runs(general)
    for fields in drawn:
        argument = b" ".join(fields) + end
        for _ in range(2):  # the second time it may be remembered
            assert said(read, argument) == said(general, argument)


def test_what_is_remembered_is_the_slot_alone() -> None:
    read = arguments._of_runs(general)
    for number in range(3 * arguments.MOST_ALIKE):
        run = number, number % 2, number
        argument = b"timeout=%d lease=30" % number + b" owner=run-%d attempt=%d label=me %d" % run
        for _ in range(2):
            asked = read(argument)
            assert (asked.timeout, asked.lease) == (number, 30)
            assert asked.owner == (b"run-%d" % number, number % 2, 0)
            assert asked.label == b"me %d" % number
