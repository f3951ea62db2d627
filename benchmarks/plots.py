"""The plot of docs/images: bars of what is compared, on light and on dark."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.record import Record
from benchmarks.report import COMPARED, LABELS
from benchmarks.table import number
from examples.demo import stage

IMAGES = stage.ROOT / "docs" / "images"

# Nothing of an earlier run in the file: the same figures give the same bytes.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "speed"})


@dataclass(frozen=True)
class Shade:
    """Colours on one background, which is the page's own."""

    name: str
    text: str
    muted: str
    ours: str
    others: str


SHADES = (
    Shade("light", "#1f2328", "#59636e", "#0969da", "#b7bfc8"),
    Shade("dark", "#f0f6fc", "#9198a1", "#4493f8", "#59616b"),
)


def draw(document: Record) -> Iterator[Path]:
    """Draw what the record has of `COMPARED`, and give the files."""
    topics = {topic["key"]: topic for topic in document["topics"]}
    shown = [(topics[key], title) for key, title in COMPARED.items() if key in topics]
    IMAGES.mkdir(parents=True, exist_ok=True)
    for shade in SHADES:
        path = IMAGES / f"speed-{shade.name}.svg"
        bars(shown, document, shade).savefig(path, transparent=True, metadata={"Date": None})
        yield path


def bars(shown: list[tuple[Any, str]], document: Record, shade: Shade) -> Figure:
    """A panel for each topic: medians, and thin lines from the least to the most."""
    rows = (len(shown) + 1) // 2
    figure = Figure(figsize=(10, 2.3 * rows), layout="constrained")
    panels = list(figure.subplots(rows, 2).flat)
    for axes in panels[len(shown) :]:
        axes.remove()
    del panels[len(shown) :]
    for axes, (topic, title) in zip(panels, shown, strict=True):
        panel(axes, topic, title, shade)
    # Bars as thick in one panel as in the next.
    most = max(axes.get_ylim()[0] for axes in panels)
    for axes in panels:
        axes.set_ylim(most, -0.5)
    text = (
        f"make bench, {document['date'][:10]}: medians of {document['rounds']} rounds on "
        f"{document['machine']['cores']} cores of {document['machine']['processor']}. "
        "Thin lines: least to most."
    )
    figure.supxlabel(text, x=0.01, ha="left", fontsize=9, color=shade.muted)
    return figure


def panel(axes: Axes, topic: dict[str, Any], title: str, shade: Shade) -> None:
    rows = list(topic["figures"].items())
    medians = [statistics.median(values) for _, values in rows]
    most = max(max(values) for _, values in rows)
    places = range(len(rows))
    colours = [shade.ours if name == topic["ours"] else shade.others for name, _ in rows]
    axes.barh(places, medians, color=colours, height=0.62)
    for place, (_, values), median in zip(places, rows, medians, strict=True):
        axes.plot([min(values), max(values)], [place, place], color=shade.muted, linewidth=1.2)
        text = f"{median:.0f}" if median >= 10 else number(median)
        axes.text(
            max(values) + most * 0.02, place, text, va="center", color=shade.text, fontsize=10
        )
    axes.set_title(title, loc="left", color=shade.text, fontsize=11, pad=8)
    axes.set_yticks(places, [LABELS.get(name, name) for name, _ in rows])
    axes.tick_params(axis="y", colors=shade.text, length=0, labelsize=10)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, most * 1.18)
    axes.xaxis.set_visible(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
