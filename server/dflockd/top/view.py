"""How it is drawn. Pure: data, a size and a time go in, lines come out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from math import inf
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflockd.admin import duration, printable
from dflockd.top.look import HELP, WAITERS, Look
from dflockd.top.survey import Row, ServerReport, ShardCounts, in_order
from dflockd.wire import UNLIMITED

MIN_SERVER_WIDTH = 100
"""Columns from which on the server of each key is shown as well."""

MIN_LONGEST_WIDTH = 110
"""Columns from which on the longest wait for each key is shown."""

MIN_BAR_WIDTH = 90
"""Columns from which on there is a bar for the lease."""

BAR = 10

_TASK = re.compile(r"([^\s\[\]]+)\[([^\]\s]+)\](?: (.+))? (\S+) pid (\d+)")
"""What the run of a task is labelled with."""

SHOWN_OF_RUN = 8
"""Characters of the name of a run: those of the plugin are digests."""

LOW, EMPTY = 0.4, 0.15
"""Shares of a lease. It is renewed at half of it: what is left of less was not renewed in time."""


def draw(
    reports: Sequence[ServerReport],
    shards: ShardCounts | None,
    *,
    look: Look,
    width: int,
    height: int,
    now: float,
    hint: str = "",
) -> RenderableType:
    """Return what to print: totals, what is wrong, and as many keys or waiters as there is room for.

    Args:
        reports: what each server said last; since then, ages have grown and leases run down.
        shards: the shards of a cluster.
        look: what is wanted; it scrolls back where there is less than that.
        width: in columns.
        height: in lines.
        now: the time, by `clock.now`.
        hint: the last line: which keys of the keyboard do what.
    """
    if look.helps:
        return _help()
    above = [_totals(reports, shards), *_problems(reports, shards)]
    room = max(1, height - len(above) - 2)  # the names of the columns, and the line below
    asked = {report.server: report.asked_at for report in reports}
    shows_server = len(reports) > 1 and width >= MIN_SERVER_WIDTH
    make = _waiters if look.view == WAITERS else _keys
    table, lines = make(reports, look, _Frame(room, asked, now, width, shows_server))
    below = _below(reports, look, room, lines, hint)
    return Group(*above, table, _line(below, "reverse" if look.is_typing else "dim"))


class _Frame(NamedTuple):
    """What there is to draw on, and the times at which each server was asked."""

    room: int
    asked: Mapping[str, float]
    now: float
    width: int
    shows_server: bool


def _table() -> Table:
    return Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="bold")


def _keys(reports: Sequence[ServerReport], look: Look, frame: _Frame) -> tuple[Table, int]:
    room, asked, now, width, shows_server = frame
    rows = in_order(chain(*(report.rows for report in reports)), look.sort)
    look.keep_within(len(rows), room)
    table, has_bar, has_oldest = _table(), width >= MIN_BAR_WIDTH, width >= MIN_LONGEST_WIDTH
    fixed, wide = 22 + (BAR + 1) * has_bar + 8 * has_oldest, 4 if has_bar else 5
    names = (width - fixed) * wide // (3 + wide + 2 * shows_server) - 1
    table.add_column("KEY", ratio=3, no_wrap=True)
    table.add_column("HELD BY", ratio=wide, no_wrap=True)
    table.add_column("FOR", justify="right", no_wrap=True, min_width=6)
    if has_bar:
        table.add_column("LEASE", width=BAR, no_wrap=True)
    table.add_column("LEFT", justify="right", no_wrap=True, min_width=6)
    table.add_column("WAITING", justify="right", no_wrap=True)
    if has_oldest:
        table.add_column("LONGEST", justify="right", no_wrap=True)
    if shows_server:
        table.add_column("SERVER", ratio=2, no_wrap=True)
    for row in rows[look.top : look.top + room]:
        since = max(0.0, now - asked[row.server])
        cells = _cells(row, since, 0 if look.full_ids else max(16, names), has_bar)
        if has_oldest:
            cells.append(duration(row.oldest_s + since) if row.oldest_s else "")
        table.add_row(*cells, *([Text(row.server)] if shows_server else []))
    return table, len(rows)


def _waiters(reports: Sequence[ServerReport], look: Look, frame: _Frame) -> tuple[Table, int]:
    room, asked, now, width, shows_server = frame
    rows = sorted(
        chain(*(report.waiting for report in reports)),
        key=lambda row: (asked[row.server] - row.waited_s, row.key, row.position),
    )
    look.keep_within(len(rows), room)
    table, has_holder = _table(), width >= MIN_SERVER_WIDTH
    wide = 4 if has_holder else 5
    names = (width - 21) * wide // (3 + wide + 4 * has_holder + 2 * shows_server) - 1
    table.add_column("WHO WAITS", ratio=wide, no_wrap=True)
    table.add_column("FOR", ratio=3, no_wrap=True)
    table.add_column("PLACE", justify="right", no_wrap=True)
    table.add_column("WAITED", justify="right", no_wrap=True, min_width=6)
    table.add_column("ABOUT", justify="right", no_wrap=True, min_width=6)
    if has_holder:
        table.add_column("HELD BY", ratio=4, no_wrap=True)
    if shows_server:
        table.add_column("SERVER", ratio=2, no_wrap=True)
    for row in rows[look.top : look.top + room]:
        since = max(0.0, now - asked[row.server])
        most = 0 if look.full_ids else max(16, names)
        yet = "" if row.pace_s is None else duration(row.pace_s * row.position)
        who = (short(row.label, most) or "somebody") + _in_group(row.group)
        cells: list[RenderableType] = [
            Text(who),
            Text(printable(row.key)),
            f"{row.position}/{row.waiters}",
            duration(row.waited_s + since),
            yet,
        ]
        if has_holder:
            cells.append(Text(row.paused or row.rate or short(row.holder, most) or "nobody yet"))
        table.add_row(*cells, *([Text(row.server)] if shows_server else []))
    return table, len(rows)


def short(label: str, most: int) -> str:
    """Return whom a label names in so many columns, as far as that can be: 0 for all of it.

    Of the run of a task its host and pid are what is kept whole, then the beginning of its id, then
    the end of its name.
    """
    found = _TASK.fullmatch(label)
    if found is None or not most:
        return printable(label)
    name, run, does, host, pid = found.groups()
    behind = printable(f"[{run[:SHOWN_OF_RUN]}]{f' {does}' if does else ''} {host}:{pid}")
    name = printable(name)
    room = max(1, most - cell_len(behind))
    if cell_len(name) > room:
        name = name.rpartition(".")[2]
    if cell_len(name) > room:
        name = f"…{name[len(name) - room + 1 :]}" if room > 1 else "…"
    return name + behind


def _below(reports: Sequence[ServerReport], look: Look, room: int, lines: int, hint: str) -> str:
    if look.is_typing:
        return f"show what has: {look.filter}_   Enter: done  Esc: show all"
    shown = min(room, lines)
    total = sum(report.keys for report in reports)
    if look.view == WAITERS or look.filter:
        total = sum(max(0, report.matched) for report in reports)
    parts = []
    if look.top:
        parts.append(f"{look.top + 1} to {look.top + shown} of {max(total, lines)}")
    elif total > shown:
        what = "waiters" if look.view == WAITERS else "keys"
        parts.append(f"{total - shown} more {what}")
    parts.append("who waits, longest first" if look.view == WAITERS else f"by {look.sort}")
    if look.filter:
        parts.append(f"with {printable(look.filter)!r}")
    return ", ".join(parts) + hint


def _help() -> RenderableType:
    table = _table()
    table.add_column("KEY", no_wrap=True)
    table.add_column("")
    for key, text in HELP:
        table.add_row(Text(key), Text(text))
    return Group(table, _line("any key: back", "dim"))


def _totals(reports: Sequence[ServerReport], shards: ShardCounts | None) -> Text:
    answered = [report for report in reports if not report.error]
    keys = sum(report.keys for report in answered)
    connections = sum(report.connections for report in answered)
    parts = [
        f"{len(answered)} of {len(reports)} servers answer",
        f"{keys} key{'' if keys == 1 else 's'}",
        f"{sum(report.waiters for report in answered)} waiting",
        f"{connections} connection{'' if connections == 1 else 's'}",
    ]
    if shards is not None and shards.servers:
        each = ", ".join(f"{server} {count}" for server, count in sorted(shards.servers.items()))
        parts.append(f"shards: {each}")
    return _line(", ".join(parts), "bold")


def _problems(reports: Sequence[ServerReport], shards: ShardCounts | None) -> list[Text]:
    problems = [report.error for report in reports if report.error]
    problems += [f"deadlock: {circle}" for report in reports for circle in report.circles]
    problems += [
        f"{report.server} grants nothing: it is {report.status}"
        for report in reports
        if report.status != "serving"
    ]
    if shards is not None and shards.error:
        problems.insert(0, shards.error)
    if shards is not None and shards.unserved:
        problems.insert(0, f"{shards.unserved} shards have no server")
    return [_line(printable(problem), "red") for problem in problems]


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _cells(row: Row, since: float, most: int, has_bar: bool) -> list[RenderableType]:
    key, waiters = Text(printable(row.key)), Text(str(row.waiters), "bold" if row.waiters else "")
    if not row.holders:
        empty: list[RenderableType] = [""] * (3 if has_bar else 2)
        return [key, Text(row.paused or row.rate or "nobody yet", "dim"), *empty, waiters]
    who = short(row.label, most) or "somebody"
    # The label of a task has its id, and the pid behind it must not be cut off by a digest of that.
    if row.owner and not _TASK.fullmatch(row.label):
        who += f", run {printable(row.owner[:SHOWN_OF_RUN])} attempt {row.attempt}"
    who += _in_group(row.group)
    if row.limit != 1:
        used = row.used or row.holders
        slots = str(used) if row.limit == UNLIMITED else f"{used} of {row.limit}"
        who = f"{slots}: {who}"
    if row.rate:
        who += f", {row.rate}"
    if row.paused:
        who += f", {row.paused}"
    if row.newer:
        who += f", superseded by {printable(row.newer)}"
    held = "" if row.held_s == inf else duration(row.held_s + since)
    left = max(0.0, row.left_s - since)
    lease = _lease(left, row.lease_s)
    return [key, Text(who), held, *(lease if has_bar else lease[1:]), waiters]


def _in_group(group: str) -> str:
    return f", group {printable(group)}" if group else ""


def _lease(left: float, lease: float) -> list[RenderableType]:
    if not lease:
        return ["", duration(left)]
    share = min(1.0, left / lease)
    style = "green" if share > LOW else "yellow" if share > EMPTY else "red"
    bar = ProgressBar(lease, min(left, lease), BAR, complete_style=style, finished_style=style)
    return [bar, Text(duration(left), "" if share > EMPTY else "red")]
