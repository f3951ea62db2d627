"""A picture of what happened around a finding: as text, and as SVG.

A lane for each process that had to do with the lock, sections as bars, faults as marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from tests.chaos.history import Event
from tests.chaos.story import Finding, Section, Story

MARGIN = 400_000_000
"""Nanoseconds that are shown before and after what the finding is about."""

LONGEST = 6_000_000_000
"""Nanoseconds that are shown at most."""

COLUMNS = 100
MOST_LANES = 24

WAITING, HELD, OVER, KILLED, FAULT = ".", "=", "-", "X", "#"
LEGEND = "  . waits   = holds within its lease   - goes on beyond it   X killed   # fault   ^ here"


@dataclass(frozen=True)
class Bar:
    """Something that took from `start` to `end`, in nanoseconds."""

    start: int
    end: int
    sign: str
    label: str = ""


@dataclass(frozen=True)
class Lane:
    label: str
    bars: list[Bar]


@dataclass(frozen=True)
class Picture:
    """What is to be drawn, between two times."""

    title: str
    start: int
    end: int
    at: int
    lanes: list[Lane]

    def column(self, at: int, columns: int) -> int:
        share = (at - self.start) / max(1, self.end - self.start)
        return max(0, min(columns - 1, int(share * columns)))


def picture(events: Iterable[Event], finding: Finding) -> Picture:
    """What happened to the key of a finding around it."""
    story = Story(events)
    start, end = _window(story, finding)
    lanes: dict[tuple[int, int], list[Bar]] = {}
    for attempt in story.attempts.values():
        asked = attempt.get("asked") or attempt.get("queued")
        first = attempt.get("granted") or attempt.get("gave_up")
        if asked is None or asked.key != finding.key:
            continue
        over = first.at if first is not None else story.death(asked) or story.finish
        if asked.at < end and over > start:
            lanes.setdefault((asked.group, asked.pid), []).append(Bar(asked.at, over, WAITING))
    for section in story.sections:
        begin = section.begin
        if begin.key == finding.key and section.at < end and section.end > start:
            lanes.setdefault((begin.group, begin.pid), []).extend(_bars(section))
    shown = [Lane(f"pid {pid}", bars) for (_, pid), bars in sorted(lanes.items())[:MOST_LANES]]
    faults = [_fault(event) for event in story.events if event.what == "fault"]
    for fault in faults:
        if fault.start < end and fault.end >= start:
            shown.append(Lane(fault.label, [Bar(fault.start, fault.end, FAULT)]))
    return Picture(f"{finding.kind}: {finding.text}", start, end, finding.at, shown)


def _window(story: Story, finding: Finding) -> tuple[int, int]:
    times = [finding.at, *(event.at for event in finding.events)]
    concerned = {event.who for event in finding.events}
    times += [min(s.end, s.sure) for s in story.sections if s.begin.who in concerned]
    start = max(min(times) - MARGIN, finding.at - LONGEST // 2)
    return start, min(max(times) + MARGIN, finding.at + LONGEST // 2)


def _bars(section: Section) -> Iterable[Bar]:
    fence = "" if section.begin.fence is None else str(section.begin.fence % 1000)
    yield Bar(section.at, section.sure, HELD, fence)
    if section.sure < section.end:
        yield Bar(section.sure, section.end, OVER)
    if section.killed:
        yield Bar(section.end, section.end, KILLED)


def _fault(event: Event) -> Bar:
    return Bar(event.at, event.until or event.at, FAULT, event.detail)


def text(drawn: Picture, columns: int = COLUMNS) -> str:
    """The picture in letters."""
    margin = max((len(lane.label) for lane in drawn.lanes), default=0) + 2
    lines = [drawn.title, LEGEND]
    for lane in drawn.lanes:
        row = [" "] * columns
        for bar in lane.bars:
            first, last = drawn.column(bar.start, columns), drawn.column(bar.end, columns)
            bar_text = (bar.label + bar.sign * columns)[: max(1, last - first)]
            row[first : first + len(bar_text)] = bar_text
        lines.append(f"{lane.label:{margin}}{''.join(row).rstrip()}")
    lines.append(" " * (margin + drawn.column(drawn.at, columns)) + "^")
    width = (drawn.end - drawn.start) / 1e9
    lines.append(f"{'':{margin}}|{f' {width:.2f} s ':-^{columns - 2}}|")
    return "\n".join(lines)


_COLOURS = {WAITING: "#ccc", HELD: "#4a90d9", OVER: "#e8b04a", KILLED: "#c0392b", FAULT: "#8e44ad"}
_WIDTH, _LEFT, _HEIGHT = 1000, 220, 22


def svg(drawn: Picture) -> str:
    """The picture as an SVG document."""
    height = (len(drawn.lanes) + 3) * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + _LEFT}" height="{height}" '
        'font-family="monospace" font-size="12">',
        f'<text x="4" y="15">{escape(drawn.title)}</text>',
    ]
    for row, lane in enumerate(drawn.lanes, 1):
        top = row * _HEIGHT
        parts.append(f'<text x="4" y="{top + 15}">{escape(lane.label)}</text>')
        parts.extend(_rectangle(drawn, bar, top) for bar in lane.bars)
    here = _LEFT + drawn.column(drawn.at, _WIDTH)
    bottom = height - _HEIGHT
    parts.append(f'<path d="M{here} {_HEIGHT}V{bottom}" stroke="red" stroke-dasharray="4"/>')
    seconds = (drawn.end - drawn.start) / 1e9
    parts.append(f'<text x="{_LEFT}" y="{height - 6}">{seconds:.2f} s from left to right</text>')
    return "\n".join([*parts, "</svg>"])


def _rectangle(drawn: Picture, bar: Bar, top: int) -> str:
    left, right = drawn.column(bar.start, _WIDTH), drawn.column(bar.end, _WIDTH)
    return (
        f'<rect x="{_LEFT + left}" y="{top + 3}" width="{max(2, right - left)}" '
        f'height="{_HEIGHT - 6}" fill="{_COLOURS[bar.sign]}"><title>{escape(bar.label)}'
        f"</title></rect>"
    )


def pictures(events: Sequence[Event], finding: Finding) -> tuple[str, str]:
    """The picture around a finding, as text and as SVG."""
    drawn = picture(events, finding)
    return text(drawn), svg(drawn)
