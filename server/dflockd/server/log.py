"""The log of a server: it holds up nobody, and strangers cannot fill it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading

MOST_LINES = 10_000
"""Lines that wait to be written. More are dropped and counted."""

LAST_LINES = 1.0
"""Seconds for what is left to be written at the end."""

PAUSE = 1.0
"""Seconds between two lines of one sort."""


class SparingLog:
    """Logs the first event of a sort at once, then one line a second that stands for the others.

    Anyone who can connect can cause these events. A line for each would fill the disk and cost
    time.

    Args:
        loop: where the lines that are put off are written.
        logger: where to.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, logger: logging.Logger) -> None:
        self._loop = loop
        self._logger = logger
        self._sorts: dict[str, _Sort] = {}

    def warning(self, text: str, *arguments: object) -> None:
        """Log an event at WARNING. Its sort is `text`, so that there are few of them."""
        self._log(logging.WARNING, text, arguments)

    def error(self, text: str, *arguments: object) -> None:
        """The same at ERROR."""
        self._log(logging.ERROR, text, arguments)

    def exception(self, text: str, *arguments: object) -> None:
        """The same with the traceback of what is being handled, of the first of them."""
        self._log(logging.ERROR, text, arguments, with_traceback=True)

    def _log(
        self,
        level: int,
        text: str,
        arguments: tuple[object, ...],
        *,
        with_traceback: bool = False,
    ) -> None:
        sort = self._sorts.get(text)
        if sort is not None:
            sort.more += 1
            sort.arguments = arguments
            return
        self._logger.log(level, text, *arguments, exc_info=with_traceback)
        self._sorts[text] = sort = _Sort(level, arguments)
        self._loop.call_later(PAUSE, self._flush, text, sort)

    def _flush(self, text: str, sort: _Sort) -> None:
        if not sort.more:
            del self._sorts[text]
            return
        line = text + " (%d times in the last second)"
        self._logger.log(sort.level, line, *sort.arguments, sort.more)
        sort.more = 0
        self._loop.call_later(PAUSE, self._flush, text, sort)


class _Sort:
    __slots__ = ("arguments", "level", "more")

    def __init__(self, level: int, arguments: tuple[object, ...]) -> None:
        self.level = level
        self.arguments = arguments
        """Those of the latest event."""
        self.more = 0
        """Events since the last line."""


class BoundedLog(logging.Handler):
    """Writes lines to a descriptor in a thread: a full disk or pipe stops that thread alone.

    Args:
        file: the descriptor. No buffer of Python's is in between: at its end the process would wait for
            the lock of one.
    """

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._lines: queue.Queue[bytes] = queue.Queue(MOST_LINES)
        self._dropped = 0
        threading.Thread(target=self._write, name="dflockd-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a line over, or count it if there are too many."""
        text = self.format(record) + "\n"
        if self._dropped:
            text = f"{self._dropped} lines dropped: the log was not read\n{text}"
        try:
            self._lines.put_nowait(text.encode(errors="backslashreplace"))
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Wait until all is written, but not for long."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(
                lambda: not self._lines.unfinished_tasks, LAST_LINES
            )

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            with contextlib.suppress(OSError):  # the reader is gone
                while line:
                    line = line[os.write(self._file, line) :]
            self._lines.task_done()
