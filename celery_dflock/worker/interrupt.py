"""Raising an exception in the thread that runs a task, from another thread."""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from types import FrameType, TracebackType
from typing import Any, Self, TypeAlias

SIGNAL = getattr(signal, "SIGURG", None)
"""Wakes the main thread. Celery uses it for nothing, and by default the system ignores it."""

RunSoon: TypeAlias = Callable[[Callable[[], object]], object]
"""Has a function called by the hub of a thread's greenlets."""

_pending: dict[int, Interruptible] = {}


class Interruptible:
    """A stretch of code of this thread that `interrupt` can end from another thread.

    In the main thread a signal does it, at once, also out of a blocking call. In other threads the
    interpreter does it, once they run Python code again: a blocking call ends first. Under gevent
    and eventlet the hub does it, out of whatever the greenlet waits for: one that never waits is
    not interrupted, and nobody could try.
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
        self._run_soon = _hub()
        if self._run_soon is not None:
            self._greenlet: Any = import_module("greenlet").getcurrent()
        elif self._is_main and SIGNAL is not None:
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
        if self._error is not None and not self._is_main and self._run_soon is None:
            _raise_in_thread(self._ident, None)

    def interrupt(self, error: BaseException) -> bool:
        """Raise `error` in the stretch, from another thread; ``False`` where that cannot be done."""
        with self._mutex:
            return self._interrupt(error)

    def _interrupt(self, error: BaseException) -> bool:
        if not self._open:
            return False
        self._error = error
        if self._run_soon is not None:
            self._run_soon(self._throw)
            return True
        if not self._is_main:
            # The interpreter takes a class and makes the instance itself.
            _raise_in_thread(self._ident, _as_class(error))
            return True
        if SIGNAL is None:
            return False
        signal.pthread_kill(self._ident, SIGNAL)
        return True

    def _throw(self) -> None:
        """Raise the error in the greenlet, which waits: this runs in the hub."""
        error, self._error = self._error, None
        if self._open and error is not None:
            self._greenlet.throw(error)

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


def _hub() -> RunSoon | None:
    """Return the way to the hub of this greenlet, or ``None`` where threads are threads."""
    gevent_monkey = sys.modules.get("gevent.monkey")
    if gevent_monkey is not None and gevent_monkey.is_module_patched("threading"):
        run_soon: RunSoon = import_module("gevent").get_hub().loop.run_callback_threadsafe
        return run_soon
    eventlet_patcher = sys.modules.get("eventlet.patcher")
    if eventlet_patcher is not None and eventlet_patcher.is_monkey_patched("thread"):
        hub = import_module("eventlet.hubs").get_hub()
        return functools.partial(hub.schedule_call_global, 0)
    return None
