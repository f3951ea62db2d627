"""The figures of a run for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table

WIDTHS = {"median": 9, "least - most": 17, "ratio": 8, "spread": 6, "goal": 27}
WIDTH = 30 + sum(WIDTHS.values()) + 2 * len(WIDTHS)


def number(value: float) -> str:
    """Return a figure with three digits that count."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def tables(topics: Iterable[dict[str, Any]]) -> Iterator[RenderableType]:
    """Give what to print of each topic: ours first, then the others and what ours is of each."""
    for topic in topics:
        yield f"\n[bold]{topic['title']}[/bold] ({topic['unit']})"
        drawn = Table(box=None, header_style="dim", pad_edge=False)
        drawn.add_column("", width=30, no_wrap=True)
        for name, width in WIDTHS.items():
            drawn.add_column(name, width=width, justify="right", no_wrap=True)
        for name, values in topic["figures"].items():
            spread = f"{number(min(values))} - {number(max(values))}"
            drawn.add_row(name, number(topic["medians"][name]), spread, *compared(topic, name))
        yield drawn


def compared(topic: dict[str, Any], name: str) -> list[str]:
    """Return the cells of a row about ratio and goal."""
    if name == topic["ours"]:
        limit = topic.get("limit")
        return ["", "", f"{wanted(topic, limit)} {verdict(limit)}" if limit else ""]
    ratio = topic["ratios"].get(name)
    if ratio is None:
        return ["", "", ""]
    cells = [f"{number(ratio['median'])}x", f"{ratio['spread']:.0%}"]
    if "goal" not in ratio:
        return [*cells, ""]
    return [*cells, f"{wanted(topic, ratio)} {verdict(ratio)}"]


def wanted(topic: dict[str, Any], goal: dict[str, Any]) -> str:
    """Return what must be, and what had better be."""
    both = [goal["goal"], goal["aim"]] if "aim" in goal else [goal["goal"]]
    return f"{'≥' if topic['more_is_better'] else '≤'} {' / '.join(f'{each:,g}' for each in both)}"


def verdict(goal: dict[str, Any]) -> str:
    if not goal["reached"]:
        return "[red]missed[/red]"
    return f"[green]{'aim ' if goal.get('aim reached') else ''}reached[/green]"
