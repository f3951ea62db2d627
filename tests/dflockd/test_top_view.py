"""What is drawn of what servers say: data, a size and a time go in, lines come out."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from dflockd.admin import printable
from dflockd.top.survey import Report, Row, Shards
from dflockd.top.view import draw, duration

NOW = 1000.0

HOSTILE = "a\x1b[2J\x1b]0;owned\x07b\r\nc\u202ed\x9b31m\u200b"


def row(key: str, **fields: object) -> Row:
    given = {"limit": 1, "holders": 1, "waiters": 0, "label": "me", "held_s": 5.0}
    return Row("one:1", key, **{**given, "lease_s": 30.0, "left_s": 30.0, **fields})  # type: ignore[arg-type]


def report(*rows: Row, server: str = "one:1", **fields: object) -> Report:
    waiters = sum(row.waiters for row in rows)
    given = {"rows": rows, "keys": len(rows), "waiters": waiters, "connections": 4}
    return Report(server, NOW, **{**given, **fields})  # type: ignore[arg-type]


def lines(
    *reports: Report,
    shards: Shards | None = None,
    sort: str = "waiters",
    width: int = 90,
    height: int = 20,
    later: float = 0.0,
    styled: bool = False,
) -> list[str]:
    file = io.StringIO()
    colours = "standard" if styled else None
    console = Console(file=file, width=width, force_terminal=styled, color_system=colours)  # type: ignore[arg-type]
    console.print(
        draw(reports, shards, sort=sort, width=width, height=height, now=NOW + later, hint=" HINT")
    )
    return file.getvalue().splitlines()


def names(drawn: list[str]) -> list[str]:
    """The first word of each line between the names of the columns and the last line."""
    [head] = [number for number, line in enumerate(drawn) if line.startswith("KEY ")]
    return [line.split()[0] for line in drawn[head + 1 : -1]]


def test_a_key() -> None:
    drawn = lines(report(row("account:7", label="sync[5be1] web-3", waiters=2)))
    assert drawn[0] == "1 of 1 servers answer, 1 keys, 2 waiting, 4 connections"
    _, head, key, last = drawn
    assert head.split() == ["KEY", "HELD", "BY", "FOR", "LEASE", "LEFT", "WAITING"]
    bar = "━" * 10
    assert key.split() == ["account:7", "sync[5be1]", "web-3", *f"5 s {bar} 30 s 2".split()]
    assert last == "by waiters HINT"


def test_the_run_that_holds_a_key() -> None:
    held = row("account:7", label="sync web-3", owner="5d1c2ab90e7f4c11", attempt=2)
    assert "sync web-3, run 5d1c2ab9 attempt 2 " in lines(report(held), width=140)[2]


def test_time_goes_on_between_two_answers() -> None:
    [drawn] = [line for line in lines(report(row("key")), later=12.0) if line.startswith("key")]
    assert "17 s" in drawn
    assert "18 s" in drawn
    assert drawn.count("━") == 6, "three fifths of ten"
    [drawn] = [line for line in lines(report(row("key")), later=99.0) if line.startswith("key")]
    assert " 0 s" in drawn, "what should have been renewed is not below nothing"


@pytest.mark.parametrize(("left", "colour"), [(30.0, "32"), (16.0, "32"), (8.0, "33"), (2.0, "31")])
def test_a_lease_that_was_not_renewed_in_time_is_not_green(left: float, colour: str) -> None:
    drawn = lines(report(row("key", left_s=left)), styled=True)
    assert [c for c in ("31", "32", "33") if f"\x1b[{c}m" in drawn[2]] == [colour]


def test_orders_over_all_servers() -> None:
    one = report(row("b", waiters=1, held_s=9), row("a", held_s=50))
    two = report(row("c", waiters=3, held_s=1), server="two:1")
    assert names(lines(one, two)) == ["c", "b", "a"]
    assert names(lines(one, two, sort="age")) == ["a", "b", "c"]
    assert names(lines(one, two, sort="key")) == ["a", "b", "c"]


def test_no_more_lines_than_there_is_room_for() -> None:
    many = report(*(row(f"key-{number:04}") for number in range(50)), keys=1000)
    drawn = lines(many, height=10, sort="key")
    assert len(drawn) == 10
    assert names(drawn) == [f"key-{number:04}" for number in range(7)]
    assert drawn[-1] == "993 more keys, by key HINT"


@pytest.mark.parametrize("width", [20, 60, 100, 200])
def test_hostile_and_wide_text_stays_in_its_place(width: int) -> None:
    wide = "全" * 100
    drawn = lines(
        report(row(HOSTILE, label=HOSTILE), row(wide, label=wide)),
        report(server="two:1", error=HOSTILE),
        width=width,
    )
    assert len(drawn) == 6
    assert all(cell_len(line) <= width for line in drawn)
    assert all(line.isprintable() for line in drawn)
    if width == 200:
        assert r"a\x1b[2J\x1b]0;owned\x07b\r\nc\u202ed\x9b31m\u200b" in drawn[3]


def test_text_of_others_is_no_markup() -> None:
    drawn = lines(report(row("[red]key[/red]", label="[bold]me[/bold] :smile:")), width=150)
    assert "[red]key[/red]" in drawn[2]
    assert "[bold]me[/bold] :smile:" in drawn[2]


def test_semaphores_and_keys_that_nobody_holds_yet() -> None:
    drawn = lines(
        report(
            row("api", limit=3, holders=2, waiters=1),
            row("new", holders=0, label="", held_s=0.0, lease_s=0.0, left_s=0.0, waiters=0),
            row("old", label=""),
        )
    )
    assert "2 of 3: me" in drawn[2]
    assert "nobody yet" in drawn[4]
    assert "━" not in drawn[4]
    assert "somebody" in drawn[3]


def test_what_is_wrong_comes_first() -> None:
    shards = Shards({"one:1": 4000, "two:1": 4190}, unserved=2, error="no list")
    drawn = lines(report(row("key")), report(server="two:1", error="two:1 is away"), shards=shards)
    assert drawn[0].startswith("1 of 2 servers answer, 1 keys, ")
    assert drawn[1:4] == ["2 shards have no server", "no list", "two:1 is away"]
    wide = lines(report(row("key")), shards=shards, width=150)
    assert wide[0].endswith("shards: one:1 4000, two:1 4190")


def test_the_server_of_a_key_is_shown_where_there_are_several_and_room() -> None:
    one, two = report(row("key")), report(server="two:1")
    assert lines(one, two, width=120)[2].split()[-1] == "one:1"
    assert lines(one, two, width=90)[2].split()[-1] == "0"
    assert lines(one, width=120)[2].split()[-1] == "0"


def test_durations() -> None:
    seconds = [0.4, 99, 100, 5999, 6000, 359_999, 360_000]
    assert [*map(duration, seconds)] == [
        *("0 s", "99 s", "2 min", "100 min", "2 h", "100 h", "4 d")
    ]


def test_printable() -> None:
    assert printable("account:7 é 全") == "account:7 é 全"
    assert printable("\x1b[31m\n\u202e\ud800") == r"\x1b[31m\n\u202e\ud800"
