"""Bytes to requests.

Any request can be had as a message. Of those that are made all day, for a slot and by whom, there need
not be one: what they say stands in the reader until the next one.
"""

from __future__ import annotations

from typing import Final, final

from dflockd.wire import arguments
from dflockd.wire.arguments import Asked, MalformedError
from dflockd.wire.messages import MAX_LINE, Request
from dflockd.wire.requests import COMMANDS, OTHER, RELEASE, RENEW, parse_request

_CARRIAGE_RETURN: Final = 13
# As a number: to look for it as ``b"\r"`` raises an exception inside of CPython, and costs 8 times
# as much.

_COMMANDS: Final = COMMANDS
# A name of this module: CPython 3.11 takes an imported name for a module's, and makes an object of the
# method at each call.


class FrameTooLongError(Exception):
    """A line is over its limit: where the next request starts can no longer be known."""


@final
class RequestReader:
    """Cuts the bytes that a peer sent into requests.

    Feed it with `receive`, then take requests with `next_request` until it returns ``None``; or with
    `next`, as long as there are `ready` ones, and `check_unfinished` then if it is `in_frame`. Taking
    is separate from feeding because a request that waits holds up those behind it. Where nothing is
    held up, `receive_one` does both.
    """

    __slots__ = (
        "_lines",
        "_tail",
        "_taken",
        "asked",
        "in_frame",
        "key",
        "lease",
        "ready",
        "space",
        "token",
    )

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._taken = 0
        self._tail = b""
        self.ready = 0
        """How many whole requests wait to be taken."""
        self.in_frame = False
        """Whether a request has begun and not ended: the one time when silence is a fault."""
        # What the request says that was just cut out. Its key is not checked.
        self.space = 0
        self.key = b""
        self.asked = Asked()
        """Of `ACQUIRE`, `ENQUEUE` and `WAIT`."""
        self.token = b""
        """Of `RELEASE` and `RENEW`."""
        self.lease: int | None = None
        """Of `RENEW`."""

    def receive(self, data: bytes) -> None:
        """Take in what was read, cut anywhere."""
        if self._tail:
            data = self._tail + data
        if _CARRIAGE_RETURN in data:
            data = data.replace(b"\r\n", b"\n")
        self._keep(data.split(b"\n"))

    def _keep(self, lines: list[bytes]) -> None:
        tail = self._tail = lines.pop()
        if self._taken < len(self._lines):
            lines = self._lines[self._taken :] + lines
        self._lines = lines
        self._taken = 0
        self.ready = len(lines) // 3
        # It stays so until more comes: requests are taken three lines at a time.
        self.in_frame = tail != b"" or len(lines) % 3 != 0

    def receive_one(self, data: bytes) -> int:
        """Take in what was read, and cut it out if it is one whole request and nothing else.

        Returns:
            Its kind; if there is only the message `OTHER`, and nothing is cut out.
        """
        if self.ready or self.in_frame or _CARRIAGE_RETURN in data:
            self.receive(data)
            return OTHER
        lines = data.split(b"\n")
        if len(lines) == 4 and not lines[3] and len(data) <= MAX_LINE:
            kind = self._read(lines[0], lines[1], lines[2])
            if kind >= RELEASE:
                lines.pop()
                self._lines = lines
                self._taken = 3
                return kind
        self._keep(lines)
        return OTHER

    def next(self) -> int:
        """Cut out the next request, which is `ready`, and return what kind it is of."""
        word, key, argument = self._lines[self._taken : self._taken + 3]
        self._taken += 3
        self.ready -= 1
        if (len(key) > MAX_LINE or len(argument) > MAX_LINE) and _over_limit(word, key, argument):
            return OTHER
        return self._read(word, key, argument)

    def _read(self, word: bytes, key: bytes, argument: bytes) -> int:
        """Return the kind of a request of short lines; if it is for a slot, the rest is here then."""
        command = _COMMANDS.get(word)
        if command is None:
            return OTHER
        kind = command.kind
        if kind < RELEASE:
            return kind
        try:
            if kind == RELEASE:
                self.token = argument if argument.isalnum() else arguments.token(argument)
            elif kind == RENEW:
                self.token, self.lease = arguments.token_and_lease(argument)
            else:
                self.asked = command.known.get(argument) or command.learn(argument)
        except MalformedError:
            return OTHER
        self.space = command.space
        self.key = key
        return kind

    def check_unfinished(self) -> None:
        """See to it that what comes after the last request that is ready may go on.

        An endless line must be refused while it comes in, not once it has filled the memory.

        Raises:
            FrameTooLongError: a line is over its limit; the stream is of no more use.
        """
        lines = self._lines[self._taken :]
        if lines or len(self._tail) > MAX_LINE:
            # A carriage return at the end may yet prove to belong to the line feed.
            _check_lengths([*lines, self._tail.removesuffix(b"\r")])

    def request(self) -> Request:
        """Return the request that was cut out last as a message.

        Raises:
            FrameTooLongError: a line is over its limit; the stream is of no more use.
        """
        command, key, argument = self._lines[self._taken - 3 : self._taken]
        if len(command) > MAX_LINE or len(key) > MAX_LINE or len(argument) > MAX_LINE:
            _check_lengths([command, key, argument])
        return parse_request(command, key, argument)

    def next_request(self) -> Request | None:
        """Return the next request as a message, or ``None`` until more bytes come.

        Raises:
            FrameTooLongError: as `request` and `check_unfinished`.
        """
        if self.ready:
            self.next()
            return self.request()
        if self.in_frame:
            self.check_unfinished()
        return None

    @property
    def pending(self) -> int:
        """Bytes received and not taken yet."""
        return sum(len(line) + 1 for line in self._lines[self._taken :]) + len(self._tail)


def _over_limit(*lines: bytes) -> str:
    """Return which line of a request is too long; nothing if none is."""
    command = COMMANDS.get(lines[0])
    for number, line in enumerate(lines):
        limit = MAX_LINE if number < 2 or command is None else command.longest
        if len(line) > limit:
            return f"line {number + 1} of a request is over {limit} bytes"
    return ""


def _check_lengths(lines: list[bytes]) -> None:
    problem = _over_limit(*lines)
    if problem:
        raise FrameTooLongError(problem)
