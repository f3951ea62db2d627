"""The story: run it with `make demo` or `python -m examples.demo`."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from celery import Task
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from examples.demo import tasks
from examples.demo.checks import Check, checks
from examples.demo.scenes import ACCOUNTS, DEPOSITS, HOLD_SECONDS, Burst, Kill, Stage, set_stage
from examples.demo.stage import StageError
from examples.demo.timeline import Legend, Timeline

INTRODUCTION = f"""\
{DEPOSITS} Celery tasks each deposit 1 into one of {len(ACCOUNTS)} accounts: read the balance, \
work a little, write the balance plus one. Two workers of two processes each run them. \
Two at once on one account, and a deposit is lost.

[bold]A[/]  the tasks as they are
[bold]B[/]  the same tasks with [cyan]base=LockedTask, lock_key="account:{{account}}"[/]
[bold]C[/]  [cyan]kill -9[/] for a process that holds a lock, while others wait for it"""


def main() -> int:
    # Whatever ends the demo, the processes that it started end with it.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    console = Console(highlight=False)
    try:
        return play(console)
    except StageError as error:
        console.print(Text(f"\n{error}", "red"), soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nInterrupted: everything that was started has been stopped.")
        return 128 + signal.SIGINT


def play(console: Console) -> int:
    """Play and show all scenes: 0 if all that is claimed was seen, else 1."""
    began = time.monotonic()
    console.print(Panel(INTRODUCTION, title="celery-dflock", box=box.ROUNDED, padding=(1, 2)))
    with contextlib.ExitStack() as opened:
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="celery-dflock-")))
        with console.status("Starting Redis, the lock server and two workers ..."):
            scenes = opened.enter_context(set_stage(directory))
        show_stage(console, scenes, time.monotonic() - began)
        without = show_burst(console, scenes, "A  without locks", tasks.plain)
        locked = show_burst(console, scenes, "B  with LockedTask", tasks.locked)
        kill = show_kill(console, scenes)
    found = checks(without, locked, kill)
    show_checks(console, found, time.monotonic() - began)
    return 0 if all(check.holds for check in found) else 1


def show_stage(console: Console, scenes: Stage, seconds: float) -> None:
    workers = " and ".join(worker.name for worker in scenes.workers)
    console.print(
        f"Up after {seconds:.1f} s: Redis, dflockd on {scenes.locks.address}, workers {workers}.\n"
    )
    console.print(Legend([f"account:{account}" for account in ACCOUNTS]))


def show_burst(console: Console, scenes: Stage, title: str, task: Task) -> Burst:
    console.print()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(TextColumn("[bold]{task.description}"), *columns, console=console) as progress:
        bar = progress.add_task(title, total=DEPOSITS)
        burst = scenes.burst(task, lambda done: progress.update(bar, completed=done))
    console.print(Timeline(burst.runs))
    lost = burst.sent - burst.balance
    style, end = ("red", f"{lost} are lost") if lost else ("green", "none is lost")
    outcome = f"{burst.sent} deposits made, the balances add up to {burst.balance}: {end}."
    console.print(indented(f"[{style}]{outcome}"))
    return burst


def show_kill(console: Console, scenes: Stage) -> Kill:
    console.print(f"\n[bold]C  kill -9[/]  for the holder of account:{ACCOUNTS[0]}")
    with console.status("One task holds the lock, two more wait for it ..."):
        kill = scenes.kill_holder(tasks.locked)
    console.print(Timeline(kill.runs))
    console.print(
        indented(
            f"Process {kill.pid} was to hold the lock for {HOLD_SECONDS:g} s. "
            f"[green]{kill.next_after_ms:.1f} ms[/] after its kill, the next had it."
        )
    )
    return kill


def show_checks(console: Console, found: Sequence[Check], seconds: float) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("", "What was checked", "measured", "wanted", ""):
        table.add_column(heading)
    for check in found:
        verdict = Text("ok", "green") if check.holds else Text("FAILED", "bold red")
        table.add_row(check.scene, check.what, check.measured, check.wanted, verdict)
    console.print(Padding(table, (1, 0, 1, 2), expand=False))
    failed = sum(not check.holds for check in found)
    outcome = f"[bold red]{failed} of {len(found)} FAILED" if failed else "[green]All as claimed"
    console.print(f"{outcome}[/], in {seconds:.1f} s.")


def indented(markup: str) -> Padding:
    return Padding(markup, (0, 0, 0, 2), expand=False)


if __name__ == "__main__":
    sys.exit(main())
