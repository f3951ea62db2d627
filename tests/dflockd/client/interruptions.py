"""Signals and cancellations that come at each possible point of a call, one after the other."""

from __future__ import annotations

import asyncio
import ctypes
import dis
import signal
import sys
import weakref
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Self

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


class Interrupted:
    """Make calls, and have a signal come in one before the given instruction of what they call.

    Its handler runs, and raises, where the interpreter sees to signals next, as in real life.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0
        self._points: dict[CodeType, frozenset[int]] = {}
        self._handler: Any = None

    def __enter__(self) -> Self:
        self._handler = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._handler)

    def call(self, function: Callable[[], object]) -> Interrupt | None:
        """Return what has interrupted it, or ``None`` if it has ended before."""
        # Coverage traces as well.
        before = sys.gettrace()
        sys.settrace(self._trace)
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
        if not frame.f_code.co_filename.startswith(CLIENT):
            # What the client calls, and not what the test does meanwhile.
            caller = frame.f_back
            if caller is None or caller.f_trace is None:
                return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in self._points_of(frame.f_code):
            self.count += 1
            if self.count == self.number:
                sys.settrace(None)
                # As the last thing, with no instruction of Python between it and the client's.
                mark = _Mark()
                self._reference = weakref.ref(mark, _trip)
        return self._trace

    def _points_of(self, code: CodeType) -> frozenset[int]:
        points = self._points.get(code)
        if points is None:
            points = self._points[code] = frozenset(
                each.offset for each in dis.get_instructions(code) if each.opname.startswith(BEFORE)
            )
        return points


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
