"""What the store has for a shard: read leniently, written in one way."""

from __future__ import annotations

import logging
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.errors import DflockdError, InvalidArgumentError
from dflockd.shards import (
    BadShardValueError,
    ShardConflictError,
    ShardRecord,
    format_shard_value,
    parse_shard_value,
)

A, B = "localhost:47001", "localhost:47002"

# The first seven are printed in the manual of the format.
PARSED = [
    (A, ShardRecord(A)),
    (f"{A},{B}", ShardRecord(A, B)),
    (f"{A},{B},f=pinned", ShardRecord(A, B, ("pinned",))),
    (f"{A},,f=pinned", ShardRecord(A, "", ("pinned",))),
    (f"f=pinned,{A},{B}", ShardRecord(A, B, ("pinned",))),
    (f"{A},f=pinned,{B}", ShardRecord(A, B, ("pinned",))),
    (f"{A},{B},f=pinned,f=readonly", ShardRecord(A, B, ("pinned", "readonly"))),
    ("", ShardRecord()),
    (",", ShardRecord()),
    (f",{B}", ShardRecord("", B)),
    (f"{A},", ShardRecord(A)),
    (f" {A} , {B} , f=pinned ", ShardRecord(A, B, ("pinned",))),
    (f"{A},{B},f=", ShardRecord(A, B)),
    (f"{A},{B},f=b,f=a,f=b", ShardRecord(A, B, ("b", "a", "b"))),
    (f"f=a,f=b,{A},f=c,{B}", ShardRecord(A, B, ("a", "b", "c"))),
    ("f=pinned", ShardRecord("", "", ("pinned",))),
    (f"{A},{B},F=pinned", ShardRecord(A, B)),
    (f"{A},{B},f=e:7,f=clean:6", ShardRecord(A, B, ("e:7", "clean:6"))),
]

WRITTEN = [
    (ShardRecord(A), f"{A},"),
    (ShardRecord(A, B), f"{A},{B}"),
    (ShardRecord("", B), f",{B}"),
    (ShardRecord(), ","),
    (ShardRecord(A, "", ("pinned", "readonly")), f"{A},,f=pinned,f=readonly"),
    (ShardRecord("node2", "", ("pinned", "readonly")), "node2,,f=pinned,f=readonly"),
    (ShardRecord(A, B, ("x", "pinned")), f"{A},{B},f=x,f=pinned"),
]

names = st.text(st.characters(exclude_characters=",", exclude_categories=["Cs"])).filter(
    lambda name: name == name.strip() and not name.startswith("f=")
)
records = st.builds(ShardRecord, names, names, st.lists(names.filter(bool), max_size=4).map(tuple))


@pytest.mark.parametrize(("text", "record"), PARSED)
def test_parse(text, record):
    assert parse_shard_value(text) == record
    assert parse_shard_value(text.encode()) == record


@pytest.mark.parametrize(("record", "text"), WRITTEN)
def test_format(record, text):
    assert format_shard_value(record) == text


@given(records)
def test_what_is_written_is_read_back(record):
    assert parse_shard_value(format_shard_value(record)) == record


@given(st.text(st.sampled_from("af=:, \n1")))
def test_whatever_is_read_can_be_written_and_is_then_stable(text):
    record = parse_shard_value(text)
    assert parse_shard_value(format_shard_value(record)) == record


def test_a_third_node_is_ignored_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "dflockd.shards"):
        assert parse_shard_value("a,b,c,f=x") == ShardRecord("a", "b", ("x",))
    assert "a,b,c,f=x" in caplog.text


def test_a_value_that_is_no_text_is_refused():
    with pytest.raises(BadShardValueError, match="not UTF-8"):
        parse_shard_value(b"\xff")


@pytest.mark.parametrize(
    "record",
    [
        ShardRecord("a,b"),
        ShardRecord("a", "b,c"),
        ShardRecord("f=a"),
        ShardRecord("a", "f=b"),
        ShardRecord(" a"),
        ShardRecord("a", "b\n"),
        ShardRecord("a", "", ("x,y",)),
        ShardRecord("a", "", ("",)),
        ShardRecord("a", "", (" x",)),
    ],
)
def test_what_would_be_read_as_something_else_is_not_written(record):
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        format_shard_value(record)


def test_a_claim_keeps_the_flags_and_their_order():
    record = parse_shard_value(f"{A},,f=new,f=e:4,f=pinned,f=clean:4")
    claimed = record._replace(current=A).with_epoch(5).with_clean(None)
    assert format_shard_value(claimed) == f"{A},{A},f=new,f=e:5,f=pinned"
    assert (claimed.epoch, claimed.clean, claimed.pinned) == (5, None, True)
    released = claimed._replace(current="").with_clean(5)
    assert format_shard_value(released) == f"{A},,f=new,f=e:5,f=pinned,f=clean:5"
    assert released.clean == 5


def test_without_an_epoch_it_is_0_and_nothing_is_clean():
    assert (ShardRecord().epoch, ShardRecord().clean) == (0, None)


def test_of_several_epochs_the_highest_counts_and_one_is_written():
    record = parse_shard_value("a,,f=e:3,f=x,f=e:12,f=e:4")
    assert record.epoch == 12
    assert format_shard_value(record.with_epoch(13)) == "a,,f=e:13,f=x"


@pytest.mark.parametrize("number", ["", "x", "-1", "1_0", " 1", "٣", "9" * 5000])
def test_an_epoch_that_cannot_be_read_is_not_taken_for_0(number):
    with pytest.raises(BadShardValueError, match="followed by a number"):
        _ = ShardRecord("a", "", (f"e:{number}",)).epoch
    with pytest.raises(BadShardValueError, match="followed by a number"):
        _ = ShardRecord("a", "", (f"clean:{number}",)).clean


def test_flags_are_set_once():
    record = ShardRecord("a").with_flag("x").with_flag("pinned").with_flag("x")
    assert record.flags == ("x", "pinned")
    assert record.without_flag("x").flags == ("pinned",)
    assert record.without_flag("none") == record


@pytest.mark.parametrize(
    ("record", "node", "moving"),
    [
        (ShardRecord("a"), "a", False),
        (ShardRecord("a", "a"), "a", False),
        (ShardRecord("a", "b"), "b", True),
        (ShardRecord("", "b"), "b", False),
        (ShardRecord(), "", False),
    ],
)
def test_the_node_to_ask(record, node, moving):
    assert (record.node, record.moving) == (node, moving)


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(ShardConflictError("two", shards=[3, 5])))
    assert isinstance(error, DflockdError)
    assert (str(error), error.shards) == ("two", (3, 5))


@pytest.mark.parametrize("name", ["epoch", "clean", "parts", "recovers"])
def test_each_number_has_a_flag_of_its_own(name):
    record = getattr(ShardRecord("a:1", "b:1"), f"with_{name}")(7)
    assert record.flags == ("e:7" if name == "epoch" else f"{name}:7",)
    assert getattr(record, name) == 7
    if name != "epoch":
        assert getattr(record, f"with_{name}")(None).flags == ()


def test_a_number_has_18_digits_at_most():
    assert ShardRecord("", "", (f"parts:{'9' * 18}",)).parts == 10**18 - 1
    record = ShardRecord("", "", ("pinned", f"parts:{'9' * 19}"))
    with pytest.raises(BadShardValueError) as raised:
        record.parts  # noqa: B018
    assert str(raised.value) == (
        f"a shard has the flags 'pinned,parts:{'9' * 19}': 'parts:' must be followed by a number"
    )
