"""The terminal: drawn again and again, and left as it was found."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

from rich.console import Console, RenderableType
from rich.live import Live

from dflockd import clock
from dflockd.address import ServerLike, parse_servers
from dflockd.ranking import SORTS
from dflockd.top.look import WAITERS, Look, keys_in
from dflockd.top.survey import DEPTH, Survey
from dflockd.top.view import draw

FRAME = 0.5
"""Seconds between two drawings, each as large as the terminal is by then."""

FIRST_PATIENCE = 3.0
"""Seconds that the first drawing waits for everybody's answer."""

PLAIN_WIDTH = 120
"""Columns where there is no terminal."""

HINT = "  s: sort  w: waiters  /: filter  h: help  q: quit"


def watch(
    servers: Sequence[ServerLike] | str,
    interval: float = 2.0,
    sort: str = "waiters",
    auth_token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    *,
    notes: bool = False,
) -> None:
    """Show who holds what until ``q`` or Ctrl-C; the terminal is left as it was.

    Without a terminal the same is printed again and again, below one another, until it is
    interrupted or nobody reads it any more.

    Args:
        servers: a list, or the text ``"cluster://host:port,..."``.
        interval: seconds between two questions to a server.
        sort: ``waiters``, ``wait``, ``age`` or ``key``, at first.
        auth_token: the servers' shared secret.
        ssl_context: for servers that speak TLS.
        notes: show also the keys that programs keep notes under; see `dflockd.admin.is_note`.

    Raises:
        InvalidArgumentError: the servers or the token cannot be such.
    """
    console = Console(highlight=False)
    look = Look(list(SORTS), sort)
    is_terminal = sys.stdout.isatty() and not console.is_dumb_terminal
    survey = Survey(parse_servers(servers), interval, sort, auth_token, ssl_context, notes=notes)
    try:
        survey.wait(FIRST_PATIENCE)
        if is_terminal:
            _show(console, survey, look)
        else:
            _print(survey, interval, look)
    except KeyboardInterrupt:
        pass
    finally:
        survey.close()


def _show(console: Console, survey: Survey, look: Look) -> None:
    with (
        _ended_by(signal.SIGTERM),
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            hint = HINT if sys.stdin.isatty() else ""
            live.update(_drawn(survey, look, *console.size, hint=hint), refresh=True)
            for key in keys_in(pressed(FRAME)):
                if not look.press(key, max(1, console.size.height - 3)):
                    return
            survey.wants(look.sort, look.filter, waiters=look.view == WAITERS)


class _PipedConsole(Console):
    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 -- it is called where that is handled, and would end the program


def _print(survey: Survey, interval: float, look: Look) -> None:
    console = _PipedConsole(width=PLAIN_WIDTH, highlight=False, no_color=True)
    try:
        while True:
            print(time.strftime("%H:%M:%S"))
            console.print(_drawn(survey, look, PLAIN_WIDTH, DEPTH))
            sys.stdout.flush()
            time.sleep(interval)
    except BrokenPipeError:
        # What is left in the buffer would raise it once more at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _drawn(survey: Survey, look: Look, width: int, height: int, hint: str = "") -> RenderableType:
    shards = survey.shards()
    return draw(
        survey.reports(),
        shards,
        look=look,
        width=width,
        height=height,
        now=clock.now(),
        hint=hint,
    )


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Give a function that waits so many seconds for keys of the keyboard, and returns them."""
    if not sys.stdin.isatty():
        yield _no_keys
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        if not select.select([descriptor], [], [], seconds)[0]:
            return ""
        return os.read(descriptor, 64).decode(errors="replace") or "q"  # the terminal is gone

    try:
        tty.setcbreak(descriptor, termios.TCSADRAIN)
        attributes = termios.tcgetattr(descriptor)
        # To be stopped with Ctrl-Z would leave the shell with this screen.
        attributes[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(descriptor, termios.TCSADRAIN, attributes)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextlib.contextmanager
def _ended_by(number: signal.Signals) -> Iterator[None]:
    """Have a signal end the process by way of every ``finally``."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(number, end)
    try:
        yield
    finally:
        signal.signal(number, before)
