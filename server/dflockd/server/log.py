"""Lines of the log that strangers can cause: no more than one a second of each sort."""

from __future__ import annotations

import asyncio
import logging

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

    def _log(self, level: int, text: str, arguments: tuple[object, ...]) -> None:
        sort = self._sorts.get(text)
        if sort is not None:
            sort.more += 1
            sort.arguments = arguments
            return
        self._logger.log(level, text, *arguments)
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
