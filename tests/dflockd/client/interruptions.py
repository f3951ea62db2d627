"""Signals and cancellations that come at each possible point of a call, one after the other."""

from __future__ import annotations

import asyncio
import ctypes
import dis
import signal
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Self

from dflockd import sync_client

CLIENT = str(Path(sync_client.__file__).parent)

BEFORE = ("CALL", "JUMP_BACKWARD", "SEND", "FOR_ITER", "LOAD_ATTR", "STORE_ATTR", "LOAD_METHOD")
BEFORE += ("RETURN", "YIELD", "BEFORE_WITH", "RAISE", "RERAISE", "STORE_SUBSCR", "DELETE")
"""A signal is seen where a function begins, after a call and at the end of a round of a loop. One
that comes before any of these instructions is seen next at a place of its own."""


class Interrupt(BaseException):
    """What a signal handler raises, or a time limit."""


class _Mark:
    """Something to refer to weakly."""


# Not a signal that is sent: its handler would run in the middle of the function that sends it.
_trip = ctypes.pythonapi.PyErr_SetInterrupt
_trip.argtypes = [ctypes.py_object]
_trip.restype = None


class Point(NamedTuple):
    """An instruction that is reached, and for which time."""

    code: CodeType
    offset: int
    time: int


def _is_of_client(frame: FrameType | None) -> bool:
    """Whether it is the client's, or called by the client, and is not what the test does meanwhile."""
    while frame is not None and frame.f_code.co_filename != __file__:
        if frame.f_code.co_filename.startswith(CLIENT):
            return True
        frame = frame.f_back
    return False


class Reached:
    """The points that a call comes to in the client, and in what the client calls.

    Each instruction is traced, which takes a hundred times as long as the call: once, to know what to
    interrupt.

    Args:
        is_meant: says of a frame whether it is looked into, where that is not the client.
    """

    def __init__(self, is_meant: Callable[[FrameType], bool] = _is_of_client) -> None:
        self._is_meant = is_meant
        self.points: list[Point] = []
        self._times: Counter[tuple[CodeType, int]] = Counter()

    def call(self, function: Callable[[], object]) -> None:
        before = sys.gettrace()
        trace_instructions(self._trace)
        try:
            function()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._is_meant(frame):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in _points_of(frame.f_code):
            self._times[frame.f_code, frame.f_lasti] += 1
            time = self._times[frame.f_code, frame.f_lasti]
            self.points.append(Point(frame.f_code, frame.f_lasti, time))
        return self._trace


class Interrupted:
    """Make a call, and have a signal come before the given instruction of what it calls.

    Its handler runs, and raises, where the interpreter sees to signals next, as in real life.
    """

    def __init__(self, point: Point, is_meant: Callable[[FrameType], bool] = _is_of_client) -> None:
        self._is_meant = is_meant
        self.has_come = False
        self._point = point
        self._times = 0
        self._handler: Any = None

    def __enter__(self) -> Self:
        self._handler = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._handler)

    def call(self, function: Callable[[], object]) -> Interrupt | None:
        """Return what has interrupted it, or ``None`` if it has ended before."""
        before = sys.gettrace()  # coverage traces as well
        trace_instructions(self._trace)
        try:
            function()
            sys.settrace(before)
            for _ in range(3):  # it may have come on the very last way out
                pass
        except Interrupt as exc:
            return exc
        finally:
            sys.settrace(before)
        return None

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        raise Interrupt

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """Look into the one function that has the instruction."""
        if frame.f_code is not self._point.code or not self._is_meant(frame):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti == self._point.offset:
            self._times += 1
            if self._times == self._point.time:
                self.has_come = True
                sys.settrace(None)
                # As the last thing, with no instruction of Python between it and the client's.
                mark = _Mark()
                self._reference = weakref.ref(mark, _trip)
        return self._trace


def trace_instructions(trace: Any) -> None:
    """Have a function see each instruction of those frames that it asks for."""
    # Python 3.12 makes these events only if a frame has asked for them before the tracing began.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)


@cache
def _points_of(code: CodeType) -> frozenset[int]:
    return frozenset(
        each.offset for each in dis.get_instructions(code) if each.opname.startswith(BEFORE)
    )


class Cancelled:
    """Await a coroutine, and have its task be cancelled where it waits for the nth time.

    Args:
        coroutine: it.
        number: from 1.
        is_late: cancelled when what it has waited for has come, just before it learns of that.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, *, is_late: bool) -> None:
        self.count = 0
        self._coroutine = coroutine
        self._number = number
        self._is_late = is_late

    def __await__(self) -> Generator[Any, Any, Any]:
        going_on = self._coroutine.__await__()
        step: Callable[[], Any] = partial(going_on.send, None)
        while True:
            try:
                future = step()
            except StopIteration as stop:
                return stop.value
            step = partial(going_on.send, None)
            self.count += 1
            if self.count == self._number:
                step = partial(going_on.throw, asyncio.CancelledError())
                if not self._is_late:
                    if future is not None:
                        future.cancel()
                    continue
            yield future
