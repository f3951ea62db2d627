"""The plots of docs/images: bars of what is compared, lines of what grows; on light and on dark."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.loads.connections import CONNECTIONS, SERVERS
from benchmarks.record import Record
from benchmarks.shown import COMPARED, LABELS, LEFT_OUT
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
    """Draw what the record has, and give the files."""
    topics = {topic["key"]: topic for topic in document["topics"]}
    IMAGES.mkdir(parents=True, exist_ok=True)
    for shade in SHADES:
        if COMPARED.keys() <= topics.keys():
            yield save(bars(topics, document, shade), f"speed-{shade.name}")
        if f"throughput-{CONNECTIONS[0]}" in topics:
            yield save(lines(topics, document, shade), f"speed-throughput-{shade.name}")


def save(figure: Figure, name: str) -> Path:
    path = IMAGES / f"{name}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None})
    return path


def bars(topics: dict[str, Any], document: Record, shade: Shade) -> Figure:
    """A panel for each of `COMPARED`: medians, and thin lines from the least to the most."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = figure.subplots(2, 2)
    for axes, (key, title) in zip(panels.flat, COMPARED.items(), strict=True):
        panel(axes, topics[key], title, shade)
    # Bars as thick in one panel as in the next.
    most = max(axes.get_ylim()[0] for axes in panels.flat)
    for axes in panels.flat:
        axes.set_ylim(most, -0.5)
    source(figure, document, shade)
    return figure


def panel(axes: Axes, topic: dict[str, Any], title: str, shade: Shade) -> None:
    rows = [row for row in topic["figures"].items() if row[0] not in LEFT_OUT]
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
    bare(axes, shade)
    axes.spines["bottom"].set_visible(False)


def lines(topics: dict[str, Any], document: Record, shade: Shade) -> Figure:
    """Locks per second over the number of connections, a line for each number of servers."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    styles = {"one server": "-", "two servers": "--", "four servers": ":"}
    for name in SERVERS:
        rates = [topics[f"throughput-{each}"]["medians"][name] / 1000 for each in CONNECTIONS]
        colour = shade.ours if name == "one server" else shade.muted
        axes.plot(
            CONNECTIONS, rates, styles[name], color=colour, linewidth=2, marker="o", label=name
        )
    axes.set_title(
        "Thousand locks per second, servers and load on one machine",
        loc="left",
        color=shade.text,
        fontsize=11,
    )
    axes.set_xscale("log")
    axes.set_xticks(CONNECTIONS, [f"{each:,}" for each in CONNECTIONS])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("connections", color=shade.text)
    axes.tick_params(colors=shade.text)
    axes.grid(axis="y", color=shade.others, alpha=0.35, linewidth=0.8)
    axes.legend(frameon=False, labelcolor=shade.text, loc="lower right")
    bare(axes, shade)
    source(figure, document, shade)
    return figure


def bare(axes: Axes, shade: Shade) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(shade.muted)


def source(figure: Figure, document: Record, shade: Shade) -> None:
    """Say below where the figures come from."""
    text = (
        f"make bench, {document['date'][:10]}: medians of {document['rounds']} rounds on "
        f"{document['machine']['cores']} cores of {document['machine']['processor']}. "
        "Shorter is better; thin lines: least to most."
    )
    if len(figure.axes) == 1:
        text = text.partition("Shorter")[0].strip()
    figure.supxlabel(text, x=0.01, ha="left", fontsize=9, color=shade.muted)
