"""What aiohttp has to say, in a log that quotes nobody and that nobody can fill."""

from __future__ import annotations

import logging

from dflockd.server import SparingLog

logger = logging.getLogger("dflockd.http")


class QuietLogger(logging.Logger):
    """What aiohttp is given as its logger: of an error only its kind is kept.

    Its messages and tracebacks quote requests, and there can be secrets in these.
    """

    def __init__(self, log: SparingLog) -> None:
        super().__init__("dflockd.http.quiet", logging.ERROR)
        self._sparing = log

    def handle(self, record: logging.LogRecord) -> None:
        """Write one line at most, and of a kind that there are few of."""
        kind = record.exc_info[0] if record.exc_info else None
        self._sparing.warning("request failed: %s", kind.__name__ if kind else "no reason given")
