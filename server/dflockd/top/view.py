"""How it is drawn. Pure: data, a size and a time go in, lines come out."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain
from math import inf

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflockd.admin import duration, printable
from dflockd.top.survey import SORTS, Report, Row, Shards
from dflockd.wire import UNLIMITED

MIN_SERVER_WIDTH = 100
"""Columns from which on the server of each key is shown as well."""

BAR = 10

SHOWN_OF_RUN = 8
"""Characters of the name of a run: those of the plugin are digests."""

LOW, EMPTY = 0.4, 0.15
"""Shares of a lease. It is renewed at half of it: what is left of less was not renewed in time."""


def draw(
    reports: Sequence[Report],
    shards: Shards | None,
    *,
    sort: str,
    width: int,
    height: int,
    now: float,
    hint: str = "",
) -> RenderableType:
    """Return what to print: totals, what is wrong, and as many keys as there is room for.

    Args:
        reports: what each server said last; since then, ages have grown and leases run down.
        shards: of a cluster.
        sort: one of `SORTS`.
        width: in columns.
        height: in lines.
        now: monotonic time.
        hint: the last line: which keys of the keyboard do what.
    """
    above = [_totals(reports, shards), *_problems(reports, shards)]
    room = max(1, height - len(above) - 2)  # the names of the columns, and the line below
    rows = heapq.nsmallest(room, chain(*(report.rows for report in reports)), SORTS[sort])
    asked = {report.server: report.asked_at for report in reports}
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="bold")
    shows_server = len(reports) > 1 and width >= MIN_SERVER_WIDTH
    table.add_column("KEY", ratio=3, no_wrap=True)
    table.add_column("HELD BY", ratio=4, no_wrap=True)
    table.add_column("FOR", justify="right", no_wrap=True, min_width=6)
    table.add_column("LEASE", width=BAR, no_wrap=True)
    table.add_column("LEFT", justify="right", no_wrap=True, min_width=6)
    table.add_column("WAITING", justify="right", no_wrap=True)
    if shows_server:
        table.add_column("SERVER", ratio=2, no_wrap=True)
    for row in rows:
        cells = _cells(row, max(0.0, now - asked[row.server]))
        table.add_row(*cells, *([Text(row.server)] if shows_server else []))
    more = sum(report.keys for report in reports) - len(rows)
    below = (f"{more} more keys, " if more > 0 else "") + f"by {sort}{hint}"
    return Group(*above, table, _line(below, "dim"))


def _totals(reports: Sequence[Report], shards: Shards | None) -> Text:
    answered = [report for report in reports if not report.error]
    parts = [
        f"{len(answered)} of {len(reports)} servers answer",
        f"{sum(report.keys for report in answered)} keys",
        f"{sum(report.waiters for report in answered)} waiting",
        f"{sum(report.connections for report in answered)} connections",
    ]
    if shards is not None and shards.servers:
        each = ", ".join(f"{server} {count}" for server, count in sorted(shards.servers.items()))
        parts.append(f"shards: {each}")
    return _line(", ".join(parts), "bold")


def _problems(reports: Sequence[Report], shards: Shards | None) -> list[Text]:
    problems = [report.error for report in reports if report.error]
    if shards is not None and shards.error:
        problems.insert(0, shards.error)
    if shards is not None and shards.unserved:
        problems.insert(0, f"{shards.unserved} shards have no server")
    return [_line(printable(problem), "red") for problem in problems]


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _cells(row: Row, since: float) -> list[RenderableType]:
    key, waiters = Text(printable(row.key)), Text(str(row.waiters), "bold" if row.waiters else "")
    if not row.holders:
        return [key, Text(row.rate or "nobody yet", "dim"), "", "", "", waiters]
    who = printable(row.label) or "somebody"
    if row.owner:
        who += f", run {printable(row.owner[:SHOWN_OF_RUN])} attempt {row.attempt}"
    if row.limit != 1:
        slots = str(row.holders) if row.limit == UNLIMITED else f"{row.holders} of {row.limit}"
        who = f"{slots}: {who}"
    if row.rate:
        who += f", {row.rate}"
    if row.newer:
        who += f", superseded by {printable(row.newer)}"
    held = "" if row.held_s == inf else duration(row.held_s + since)
    left = max(0.0, row.left_s - since)
    return [key, Text(who), held, *_lease(left, row.lease_s), waiters]


def _lease(left: float, lease: float) -> list[RenderableType]:
    if not lease:
        return ["", duration(left)]
    share = min(1.0, left / lease)
    style = "green" if share > LOW else "yellow" if share > EMPTY else "red"
    bar = ProgressBar(lease, min(left, lease), BAR, complete_style=style, finished_style=style)
    return [bar, Text(duration(left), "" if share > EMPTY else "red")]
