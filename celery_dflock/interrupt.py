"""Raising an exception in the thread that runs a task, from another thread."""

from __future__ import annotations

import ctypes
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

SIGNAL = getattr(signal, "SIGURG", None)
"""Wakes the main thread. Celery uses it for nothing, and by default the system ignores it."""

_pending: dict[int, Interruptible] = {}


class Interruptible:
    """A stretch of code of this thread that `interrupt` can end from another thread.

    In the main thread a signal does it, at once, also out of a blocking call. In other threads the
    interpreter does it, once they run Python code again: a blocking call ends first. Greenlets are
    not interrupted: `interrupt` returns ``False``.
    """

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        self._is_main = threading.current_thread() is threading.main_thread()
        self._error: BaseException | None = None
        self._open = False
        self._outer: Interruptible | None = None
        # Between the look at `_open` and the interruption the stretch must not end.
        self._mutex = threading.Lock()

    def __enter__(self) -> Self:
        """Begin the stretch."""
        self._green = _threads_are_green()
        if self._is_main and SIGNAL is not None and not self._green:
            self._outer = _pending.get(self._ident)
            _pending[self._ident] = self
            if signal.getsignal(SIGNAL) is not _handle:
                signal.signal(SIGNAL, _handle)
        self._open = True
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the stretch; an interruption that has not arrived yet never does."""
        with self._mutex:
            self._open = False
        if self._outer is not None:
            _pending[self._ident] = self._outer
        else:
            _pending.pop(self._ident, None)
        if self._error is not None and not self._is_main:
            _raise_in_thread(self._ident, None)

    def interrupt(self, error: BaseException) -> bool:
        """Raise `error` in the stretch, from another thread; ``False`` where that cannot be done."""
        with self._mutex:
            return self._interrupt(error)

    def _interrupt(self, error: BaseException) -> bool:
        if not self._open or self._green:
            return False
        self._error = error
        if not self._is_main:
            # The interpreter takes a class and makes the instance itself.
            _raise_in_thread(self._ident, _as_class(error))
            return True
        if SIGNAL is None:
            return False
        signal.pthread_kill(self._ident, SIGNAL)
        return True

    def raise_pending(self) -> None:
        """Raise the error if the stretch is still open. Runs in its thread."""
        error, self._error = self._error, None
        if self._open and error is not None:
            raise error
        if self._outer is not None:
            self._outer.raise_pending()


def _handle(_number: int, _frame: FrameType | None) -> None:
    stretch = _pending.get(threading.get_ident())
    if stretch is not None:
        stretch.raise_pending()


def _as_class(error: BaseException) -> type[BaseException]:
    args = error.args

    def make(self: BaseException, *_: object) -> None:
        type(error).__init__(self, *args)

    fields = {
        "__init__": make,
        "__reduce__": lambda _: (type(error), args),
        # Result backends name the class by these, and readers look it up.
        "__module__": type(error).__module__,
        "__qualname__": type(error).__qualname__,
    }
    return type(type(error).__name__, (type(error),), fields)


def _raise_in_thread(ident: int, error: type[BaseException] | None) -> None:
    target = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), target)


def _threads_are_green() -> bool:
    return type(threading.current_thread()).__module__.startswith(("gevent", "eventlet")) or (
        getattr(threading.get_ident, "__module__", "").startswith(("gevent", "eventlet"))
    )
