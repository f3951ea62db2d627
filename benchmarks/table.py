"""The figures of a run for a terminal, and how a figure and a goal are written everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

ROW = "{:32}{:>9}{:>19}{:>9}{:>7}{:>28}"


def number(value: float) -> str:
    """Return a figure with three digits that count."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def lines(topics: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Give what to print of each topic: ours first, then the others and what ours is of each."""
    for topic in topics:
        unit = f" ({topic['unit']})" if topic["unit"] else ""
        yield f"\n{topic['title']}{unit}"
        yield ROW.format("", "median", "least - most", "ratio", "spread", "goal")
        for name, values in topic["figures"].items():
            between = f"{number(min(values))} - {number(max(values))}"
            limit = topic.get("limit") if name == topic["ours"] else None
            ratio = topic["ratios"].get(name)
            share = [f"{number(ratio['median'])}x", f"{ratio['spread']:.0%}"] if ratio else ["", ""]
            goal = ratio if ratio and "goal" in ratio else limit
            judged = f"{wanted(topic, goal)} {verdict(goal)}" if goal else ""
            yield ROW.format(name, number(topic["medians"][name]), between, *share, judged)


def wanted(topic: dict[str, Any], goal: dict[str, Any]) -> str:
    """Return what must be, and what had better be."""
    both = [goal["goal"], goal["aim"]] if "aim" in goal else [goal["goal"]]
    return f"{'≥' if topic['more_is_better'] else '≤'} {' / '.join(f'{each:,g}' for each in both)}"


def verdict(goal: dict[str, Any]) -> str:
    if not goal["reached"]:
        return "missed"
    return "aim reached" if goal.get("aim reached") else "reached"
