"""The figures of a run for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table

WIDTHS = {"median": 9, "least - most": 17, "ratio": 8, "in the rounds": 17, "goal": 18}
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
        return ["", "", f"<= {number(limit['goal'])} {reached(limit)}" if limit else ""]
    ratio = topic["ratios"].get(name)
    if ratio is None:
        return ["", "", ""]
    cells = [f"{number(ratio['median'])}x", f"{number(ratio['least'])} - {number(ratio['most'])}"]
    if "goal" not in ratio:
        return [*cells, ""]
    sign = ">=" if topic["more_is_better"] else "<="
    return [*cells, f"{sign} {ratio['goal']:g}x {reached(ratio)}"]


def reached(goal: dict[str, Any]) -> str:
    return "[green]reached[/green]" if goal["reached"] else "[red]missed[/red]"
