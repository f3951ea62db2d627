"""A timeline for the terminal: a lane for each worker process, time from left to right.

Where there is no colour the letters alone have to do: a body is drawn as its key's label and a
bar, so that two bodies in a row stay two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from examples.demo.record import Span, overlaps

# Red is for what went wrong.
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "white")
TICK_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
TICK_COLUMNS = 9
NANO = 1e9
OVERLAP_LABEL = "overlap"


@dataclass(frozen=True)
class Glyphs:
    body: str
    wait: str
    overlap: str
    kill: str


UNICODE = Glyphs(body="━", wait="┄", overlap="▲", kill="✖")
ASCII = Glyphs(body="=", wait=".", overlap="^", kill="X")


@dataclass(frozen=True)
class Look:
    """How to draw on this console."""

    glyphs: Glyphs
    coloured: bool

    @classmethod
    def of(cls, console: Console, options: ConsoleOptions) -> Look:
        coloured = console.color_system is not None and not console.no_color
        return cls(ASCII if options.ascii_only else UNICODE, coloured)

    def body(self, label: str, width: int) -> str:
        return label + (" " if self.coloured else self.glyphs.body) * (width - 1)


@dataclass(frozen=True)
class Scale:
    """Times (monotonic ns) to columns: `begin` is column 0, `end` is column `columns`."""

    begin: int
    end: int
    columns: int

    def column(self, at: int) -> int:
        return round((at - self.begin) * self.columns / max(1, self.end - self.begin))

    def range(self, start: int, end: int | None) -> tuple[int, int]:
        """First column and the one after the last; whatever took time has one at least."""
        first = min(self.column(start), self.columns - 1)
        last = self.columns if end is None else self.column(end)
        return first, max(first + 1, last)


@dataclass
class Row:
    """Cells to draw on: later drawings cover earlier ones."""

    columns: int
    cells: list[tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = [(" ", "")] * self.columns

    def draw(self, first: int, text: str, style: str) -> None:
        for offset, character in enumerate(text[: self.columns - first]):
            self.cells[first + offset] = (character, style)

    def line(self, label: str, style: str = "") -> Text:
        return Text.assemble((label, style), *self.cells, no_wrap=True, overflow="crop")


@dataclass(frozen=True)
class Timeline:
    """Runs of task bodies, as a rich renderable."""

    runs: Sequence[Span]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.runs:
            return
        look = Look.of(console, options)
        lanes = sorted({(run.worker, run.pid) for run in self.runs})
        labels = [f"{worker} {pid}" for worker, pid in lanes]
        margin = max(len(OVERLAP_LABEL), *map(len, labels)) + 4
        scale = self._scale(options.max_width - margin - 1)
        for lane, label in zip(lanes, labels, strict=True):
            yield self._lane(lane, scale, look).line(f"  {label:{margin - 2}}")
        yield self._overlaps(scale, look).line(f"  {OVERLAP_LABEL:{margin - 2}}", "dim")
        yield axis(scale).line(" " * margin)

    def _scale(self, columns: int) -> Scale:
        begin = min(run.asked for run in self.runs)
        end = max(run.end or run.start for run in self.runs)
        return Scale(begin, end, max(10, columns))

    def _lane(self, lane: tuple[str, int], scale: Scale, look: Look) -> Row:
        row = Row(scale.columns)
        for run in self.runs:
            if (run.worker, run.pid) == lane:
                self._draw(row, run, scale, look)
        return row

    def _draw(self, row: Row, run: Span, scale: Scale, look: Look) -> None:
        colour = key_colour(run.key)
        first, end = scale.range(run.start, run.end)
        if run.fence is not None:
            asked = scale.column(run.asked)
            row.draw(asked, look.glyphs.wait * (first - asked), f"dim {colour}")
        row.draw(first, look.body(key_label(run.key), end - first), f"bold black on {colour}")
        if run.killed:
            row.draw(end - 1, look.glyphs.kill, "bold white on red")

    def _overlaps(self, scale: Scale, look: Look) -> Row:
        row = Row(scale.columns)
        found = overlaps(self.runs)
        if not found:
            row.draw(0, "none", "green")
        for overlap in found:
            first, end = scale.range(overlap.start, overlap.end)
            row.draw(first, look.glyphs.overlap * (end - first), "bold red")
        return row


def key_label(key: str) -> str:
    """The last character of the key: 3 for `account:3`."""
    return key[-1]


def key_colour(key: str) -> str:
    return COLOURS[(ord(key_label(key)) - ord("1")) % len(COLOURS)]


def axis(scale: Scale) -> Row:
    """The seconds since the begin, at round numbers that have room."""
    row = Row(scale.columns)
    for at in ticks((scale.end - scale.begin) / NANO, scale.columns):
        text = f"{at:g} s"
        first = scale.column(scale.begin + round(at * NANO))
        if first + len(text) <= scale.columns:
            row.draw(first, text, "dim")
    return row


def ticks(seconds: float, columns: int) -> Iterator[float]:
    """Round times from 0 to `seconds`, at least TICK_COLUMNS apart on so many columns."""
    room = TICK_COLUMNS * seconds / columns
    step = next((step for step in TICK_SECONDS if step >= room), max(seconds, TICK_SECONDS[-1]))
    for number in range(int(seconds / step) + 1):
        yield number * step


@dataclass(frozen=True)
class Legend:
    """What the signs in a timeline mean."""

    keys: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        look = Look.of(console, options)
        text = Text("  ")
        for key in self.keys:
            text.append(look.body(key_label(key), 3), f"bold black on {key_colour(key)}")
            text.append(f" {key}  ")
        yield text
        glyphs = look.glyphs
        yield Text.assemble(
            ("  " + glyphs.wait * 3, "dim"),
            " waits for its lock  ",
            (glyphs.overlap * 3, "bold red"),
            " two at once on one account  ",
            (glyphs.kill, "bold white on red"),
            " killed",
        )
