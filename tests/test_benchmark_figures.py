"""What is made of the figures of the benchmarks: ratios, goals, shares."""

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("the benchmarks are for Linux", allow_module_level=True)

from benchmarks import report
from benchmarks.record import Rounds
from benchmarks.topic import Goal, Topic


def rounds(topic, *figures):
    kept = Rounds()
    for each in figures:
        kept.add([topic], {topic.key: each})
    [summary] = kept.summaries()
    return summary


def test_parts_of_a_whole_are_shown_with_their_share():
    kept = Rounds()
    topic = Topic("parts", "Where they are", "Ir")
    kept.add([topic], {"parts": {"few": 100.0, "less": 100.0, "many": 9800.0}})
    figures = report.Figures({"topics": kept.summaries()})

    assert "| Where they are | many | 9,800 | 98% |\n|  | 2 more | 200 | 2% |" in report.parts(
        figures
    )
    assert report.NOT_MEASURED in report.counts(figures)


def test_ratios_are_taken_within_a_round():
    topic = Topic("t", "T", "us", "ours", {"theirs": Goal(0.5, 0.45)})

    # Both are ten times slower in the second round: the machine was disturbed, not one of them.
    summary = rounds(
        topic,
        {"theirs": 10.0, "ours": 4.0},
        {"theirs": 100.0, "ours": 80.0},
        {"theirs": 10.0, "ours": 5.0},
    )

    assert list(summary["figures"]) == ["ours", "theirs"]
    assert summary["medians"] == {"ours": 5.0, "theirs": 10.0}
    assert summary["ratios"]["theirs"] == {
        "each": [0.4, 0.8, 0.5],
        "median": 0.5,
        "least": 0.4,
        "most": 0.8,
        "spread": pytest.approx(0.4),
        "goal": 0.5,
        "reached": True,
        "aim": 0.45,
        "aim reached": False,
    }


def test_a_difference_that_drowned_in_noise_has_no_ratio():
    topic = Topic("t", "T", "us", "ours", {"theirs": Goal(0.5), "others": Goal(0.5)})

    summary = rounds(
        topic,
        {"ours": -1.0, "theirs": 10.0, "others": -5.0},
        {"ours": 8.0, "theirs": 10.0, "others": -5.0},
    )

    assert summary["ratios"].keys() == {"theirs"}
    assert summary["ratios"]["theirs"]["each"] == [0.8]


@pytest.mark.parametrize(
    ("others", "steady"), [([9.0, 10.0, 11.0], True), ([5.0, 10.0, 20.0], False)]
)
def test_rounds_that_disagree_ask_for_more(others, steady):
    wanted = Topic("wanted", "T", "us", "ours", {"theirs": Goal(0.5)})
    shown = Topic("shown", "T", "us", "ours")
    kept = Rounds()
    for other in others:
        figures = {"ours": 1.0, "theirs": other}
        kept.add([wanted, shown], {"wanted": figures, "shown": figures})

    assert kept.are_steady([wanted]) is steady
    assert kept.are_steady([shown])


@pytest.mark.parametrize(("ours", "reached"), [(1.8, True), (1.6, False)])
def test_more_can_be_better(ours, reached):
    topic = Topic("t", "T", "/s", "two", {"one": Goal(1.7)}, more_is_better=True)

    assert rounds(topic, {"two": ours, "one": 1.0})["ratios"]["one"]["reached"] is reached


@pytest.mark.parametrize(("ours", "reached"), [(20.0, True), (20.1, False)])
def test_a_figure_can_have_a_limit(ours, reached):
    topic = Topic("t", "T", "ms", "ours", limit=Goal(20.0))

    assert rounds(topic, {"ours": ours})["limit"] == {"goal": 20.0, "reached": reached}
