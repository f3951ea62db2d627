"""SIGHUP, which is a wish to a server, and by default the end of a process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


class Hangups:
    """Keeps a SIGHUP until the server can act on it. Those that come meanwhile are the same wish.

    Not `add_signal_handler` of the loop: that would give the signal back to the system, which ends
    the process, when the loop closes.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_due = False
        self._before = signal.signal(signal.SIGHUP, self._note)

    def obey(self, loop: asyncio.AbstractEventLoop, reload: Callable[[], object]) -> None:
        """Call `reload` in the loop, from now on, for each and for what has come already."""
        self._reload, self._loop = reload, loop
        if self._is_due:
            self._tell(loop)

    def ignore(self) -> None:
        """Act on none any more: the loop is about to close."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def leave(self) -> None:
        """Let it be what it was: this process is no server."""
        signal.signal(signal.SIGHUP, self._before)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        # A burst of them, each with certificates to read, would hold up all clients.
        if not self._is_due:
            self._is_due = True
            if self._loop is not None:
                self._tell(self._loop)

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(self._carry_out)

    def _carry_out(self) -> None:
        self._is_due = False
        self._reload()
