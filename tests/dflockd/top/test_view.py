"""What is drawn of what servers say: data, a size and a time go in, lines come out."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from dflockd.admin import printable
from dflockd.ranking import SORTS
from dflockd.top.look import HELP, KEYS, WAITERS, Look, keys_in
from dflockd.top.survey import Row, ServerReport, ShardCounts, Waiting
from dflockd.top.view import draw, duration, short

NOW = 1000.0

HOSTILE = "a\x1b[2J\x1b]0;owned\x07b\r\nc\u202ed\x9b31m\u200b"


def row(key: str, **fields: object) -> Row:
    given = {"limit": 1, "holders": 1, "waiters": 0, "label": "me", "held_s": 5.0}
    return Row("one:1", key, **{**given, "lease_s": 30.0, "left_s": 30.0, **fields})  # type: ignore[arg-type]


def report(*rows: Row, server: str = "one:1", **fields: object) -> ServerReport:
    waiters = sum(row.waiters for row in rows)
    given = {"rows": rows, "keys": len(rows), "waiters": waiters, "connections": 4}
    return ServerReport(server, NOW, **{**given, **fields})  # type: ignore[arg-type]


def lines(
    *reports: ServerReport,
    shards: ShardCounts | None = None,
    sort: str = "waiters",
    width: int = 90,
    height: int = 20,
    later: float = 0.0,
    styled: bool = False,
    look: Look | None = None,
) -> list[str]:
    file = io.StringIO()
    colours = "standard" if styled else None
    console = Console(file=file, width=width, force_terminal=styled, color_system=colours)  # type: ignore[arg-type]
    console.print(
        draw(
            reports,
            shards,
            look=look or Look(list(SORTS), sort),
            width=width,
            height=height,
            now=NOW + later,
            hint=" HINT",
        )
    )
    return file.getvalue().splitlines()


def names(drawn: list[str]) -> list[str]:
    """The first word of each line between the names of the columns and the last line."""
    [head] = [number for number, line in enumerate(drawn) if line.startswith("KEY ")]
    return [line.split()[0] for line in drawn[head + 1 : -1]]


def test_a_key() -> None:
    drawn = lines(report(row("account:7", label="sync[5be1] web-3", waiters=2)))
    assert drawn[0] == "1 of 1 servers answer, 1 key, 2 waiting, 4 connections"
    _, head, key, last = drawn
    assert head.split() == ["KEY", "HELD", "BY", "FOR", "LEASE", "LEFT", "WAITING"]
    bar = "━" * 10
    assert key.split() == ["account:7", "sync[5be1]", "web-3", *f"5 s {bar} 30 s 2".split()]
    assert last == "by waiters HINT"


def test_the_run_that_holds_a_key() -> None:
    held = row("account:7", label="sync web-3", owner="5d1c2ab90e7f4c11", attempt=2)
    assert "sync web-3, run 5d1c2ab9 attempt 2 " in lines(report(held), width=140)[2]


def test_the_pid_of_a_task_is_seen_in_a_narrow_terminal() -> None:
    label = "shop.tasks.sync_account[5be12a4f-6a1c-4b3e] worker-3 pid 2041"
    held = row("account:7", label=label, owner="5d1c2ab90e7f4c11", attempt=0)
    for width in (80, 100):
        assert "[5be12a4f] worker-3:2041 " in lines(report(held), width=width)[2]


def test_the_groups_of_holders_and_waiters() -> None:
    drawn = lines(report(row("gpu", group="tenant:\u202e7", newer="x")), width=140)
    assert r"me, group tenant:\u202e7, superseded by x " in drawn[2]
    waits = Waiting("one:1", "gpu", 2, 3, "sync web-3", 5.0, group="tenant:7")
    look = Look(list(SORTS), "waiters", view=WAITERS)
    assert "sync web-3, group tenant:7 " in lines(report(waiting=[waits]), look=look)[2]


def test_who_waits_for_its_rate() -> None:
    waits = Waiting(
        "one:1", "vendor", 2, 3, "sync web-3", 5.0, "a holder", rate="rate: next in 4 s"
    )
    look = Look(list(SORTS), "waiters", view=WAITERS)
    drawn = lines(report(waiting=[waits]), look=look, width=140)[2]
    assert "rate: next in 4 s" in drawn
    assert "a holder" not in drawn


def test_a_paused_key() -> None:
    paused = "paused by ann@w1 for 12 s: it is down"
    held = row("api", label="a holder", paused=paused)
    assert f"a holder, {paused} " in lines(report(held), width=160)[2]
    free = lines(report(row("api", holders=0, waiters=3, paused=paused)), width=160)[2]
    assert paused in free
    waits = Waiting("one:1", "api", 1, 3, "sync web-3", 5.0, paused=paused)
    look = Look(list(SORTS), "waiters", view=WAITERS)
    assert paused in lines(report(waiting=[waits]), look=look, width=160)[2]


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


def test_how_much_of_a_limit_is_used() -> None:
    drawn = lines(
        report(
            row("all", limit=100, used=100, waiters=2),
            row("gpu", limit=8, holders=2, used=5),
            row("one each", limit=8, holders=2),
        )
    )
    assert "100 of 100: me" in drawn[2]
    assert "5 of 8: me" in drawn[3]
    assert "2 of 8: me" in drawn[4]


def test_what_is_wrong_comes_first() -> None:
    shards = ShardCounts({"one:1": 4000, "two:1": 4190}, unserved=2, error="no list")
    reports = [report(row("key")), report(server="two:1", error="two:1 is away")]
    cut_off = report(server="six:1", status="cut off")
    drawn = lines(*reports, cut_off, shards=shards)
    assert drawn[0].startswith("2 of 3 servers answer, 1 key, ")
    wrong = ["two:1 is away", "six:1 grants nothing: it is cut off"]
    assert drawn[1:5] == ["2 shards have no server", "no list", *wrong]
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


LABEL = "shop.tasks.sync_account[3f2a9c10-77aa-4bcd-9d41-000000000007] worker-2 pid 4711"


def test_host_and_pid_are_there_at_80_columns() -> None:
    held = row("account:7", label=LABEL, waiters=2)
    for width in (80, 100, 120, 160):
        [line] = [each for each in lines(report(held), width=width) if each.startswith("account")]
        assert "[3f2a9c10] worker-2:4711 " in line, width
        assert len(line) <= width
    assert "shop.tasks.sync_account[" in line, "where there is room, the whole name"
    look = Look(list(SORTS), "waiters", full_ids=True)
    assert LABEL in lines(report(held), width=200, look=look)[2]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (0, LABEL),
        (60, "shop.tasks.sync_account[3f2a9c10] worker-2:4711"),
        (40, "sync_account[3f2a9c10] worker-2:4711"),
        (30, "…count[3f2a9c10] worker-2:4711"),
        (5, "…[3f2a9c10] worker-2:4711"),
    ],
)
def test_short_labels(most: int, expected: str) -> None:
    assert short(LABEL, most) == expected
    assert short("python w1 pid 7", most) == "python w1 pid 7", "no task: as it is"
    assert short("", most) == ""


def test_a_lock_inside_a_task_says_so() -> None:
    assert short("t[0123456789] dflock h pid 7", 40) == "t[01234567] dflock h:7"


def waiting(number: int, **fields: object) -> Waiting:
    label = f"sync[{number:08}-aa] w1 pid {number}"
    given = {"waiters": 3, "label": label, "waited_s": 10.0 * number}
    return Waiting("one:1", "account:7", number, **{**given, **fields})  # type: ignore[arg-type]


def test_who_waits_longest_first() -> None:
    look = Look(list(SORTS), "waiters", view=WAITERS)
    people = [waiting(1), waiting(3, holder=LABEL, held_s=40.0, pace_s=10.0), waiting(2)]
    drawn = lines(report(waiting=people, matched=5), look=look, width=160)
    assert drawn[1].split() == [*["WHO", "WAITS", "FOR", "PLACE", "WAITED", "ABOUT", "HELD", "BY"]]
    assert [line.split()[0] for line in drawn[2:5]] == [f"sync[{n:08}]" for n in (3, 2, 1)]
    assert "account:7" in drawn[2]
    assert " 3/3 " in drawn[2]
    assert " 30 s " in drawn[2]
    assert "sync_account[3f2a9c10] worker-2:4711" in drawn[2]
    assert drawn[-1] == "2 more waiters, who waits, longest first HINT"
    narrow = lines(report(waiting=people, matched=3), look=look, width=80)
    assert "sync[00000003] w1:3" in narrow[2]
    assert all(len(line) <= 80 for line in narrow)


def test_scrolling_stops_at_both_ends() -> None:
    many = report(*(row(f"key-{number:04}") for number in range(50)), keys=50)
    look = Look(list(SORTS), "key")
    for keys, first in (
        ("\x1b[B", 1),
        ("\x1b[6~", 8),
        ("\x1b[F", 43),
        ("\x1b[A", 42),
        ("\x1b[H", 0),
    ):
        for key in keys_in(keys):
            assert look.press(key, 7)
        drawn = lines(many, height=10, look=look)
        assert names(drawn)[0] == f"key-{first:04}", keys
        assert look.top == first
        assert len(drawn) == 10
    look.press("\x1b[A", 7)
    assert look.top == 0
    look.press("\x1b[B", 7)
    assert lines(many, height=10, look=look)[-1] == "2 to 8 of 50, by key HINT"


def test_the_filter_is_typed_and_taken_back() -> None:
    look = Look(list(SORTS), "waiters")
    assert list(keys_in("/ab\x7fq\r\x1b[5~\x1bOSx\x1b")) == [
        *("/", "a", "b", "\x7f", "q", "\r", "\x1b[5~", "\x1bOS", "x", "\x1b")
    ]
    for key in keys_in("/ab\x7fq"):
        assert look.press(key, 7), "q is a letter here"
    assert (look.filter, look.is_typing) == ("aq", True)
    assert "show what has: aq_" in lines(report(row("aq")), look=look)[-1]
    look.press("\r", 7)
    assert "with 'aq'" in lines(report(row("aq"), matched=1), look=look)[-1]
    look.press("\x1b", 7)
    assert look.filter == ""
    for key in keys_in("\x1bOSx\x1b"):
        look.press(key, 7)
    assert (look.filter, look.is_typing) == ("", False)


def test_keys_of_the_keyboard() -> None:
    look = Look(list(SORTS), "waiters")
    for key in ("\x1b[17~", ">", "<", "<"):
        look.press(key, 7)
    assert look.sort == "waiters"
    look.press("w", 7)
    assert look.view == WAITERS
    look.press("s", 7)
    assert (look.view, look.sort) == (KEYS, "wait")
    look.press("?", 7)
    helped = "\n".join(lines(report(), look=look, width=150))
    assert all(text in helped for _, text in HELP)
    assert look.press("x", 7)
    assert not look.helps
    assert not look.press("\x1b[21~", 7)
    assert look.press("\x1b[99~", 7), "what it does not know does nothing"


def test_a_circle_is_a_red_line() -> None:
    drawn = lines(report(row("one"), circles=["a waits for one, held by a"]), styled=True)
    assert "deadlock: a waits for one, held by a" in drawn[1]
    assert "\x1b[31m" in drawn[1]
