"""Raising an exception in the thread that runs a task, from another thread."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from types import FrameType, TracebackType
from typing import Any, Self, TypeAlias

from dflockd import clock

SIGNAL = getattr(signal, "SIGURG", None)
"""Wakes the main thread. Celery uses it for nothing, and by default the system ignores it."""

LONGEST_BIRTH = 0.1
"""Seconds for a thread to run after it was started."""

_STRETCH = "_dflock_stretch"
"""Where a class that the interpreter raises says for whom."""

RunSoon: TypeAlias = Callable[[Callable[[], object]], object]
"""Has a function called by the hub of a thread's greenlets."""

_innermost: Interruptible | None = None
"""That of the main thread."""

_is_handled = False
"""Whether this process has the handler of the signal, as far as known: it is set once."""

_main = threading.main_thread().ident


class Interruptible:
    """A stretch of code of this thread that `interrupt` can end from another thread.

    In the main thread a signal does it, at once, also out of a blocking call. In other threads the
    interpreter does it, once they run Python code again: a blocking call ends first. Under gevent
    and eventlet the hub does it, out of whatever the greenlet waits for: one that never waits is
    not interrupted, and nobody could try.

    Attributes:
        is_open: whether the stretch has begun and not ended. An interruption that arrives as the
            stretch ends keeps `__exit__` from beginning: say ``False`` here after the ``with``.
    """

    is_open = False
    _error: BaseException | None = None
    _outer: Interruptible | None = None
    _run_soon: RunSoon | None = None
    _class: type[BaseException] | None = None
    """What the interpreter raises: the latest."""
    _has_arrived = False
    """Whether that has been raised."""
    _mutex: threading.Lock | None = None
    """Where the interpreter interrupts: between the look at `is_open` and that it must not end."""

    def __enter__(self) -> Self:
        """Begin the stretch."""
        global _innermost
        self._ident = ident = threading.get_ident()
        if "gevent.monkey" in sys.modules or "eventlet.patcher" in sys.modules:
            self._run_soon = _hub()
        if self._run_soon is not None:
            self._greenlet: Any = import_module("greenlet").getcurrent()
        elif ident != _main:
            self._mutex = threading.Lock()
        else:
            if not _is_handled and SIGNAL is not None:
                _handle_signal(SIGNAL)
            while _innermost is not None and not _innermost.is_open:
                _innermost = _innermost._outer  # its end was kept from beginning
            self._outer = _innermost
            _innermost = self
        self.is_open = True
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the stretch; an interruption that has not arrived yet never does."""
        global _innermost
        if self._mutex is not None:
            # Two can be late: that the lock is lost, and that a newer task needs it.
            while not self._is_ended(self._mutex):
                pass
            return
        self.is_open = False
        if self._run_soon is None:
            _innermost = self._outer

    def _is_ended(self, mutex: threading.Lock) -> bool:
        """End the stretch in a thread that is not the main one; ``False`` if that was interrupted."""
        try:
            with mutex:
                self.is_open = False
            if self._class is not None and not self._has_arrived:
                self._let_arrive()
        except BaseException as late:
            if vars(type(late)).get(_STRETCH) is not self:
                raise
            return False
        return True

    def interrupt(self, error: BaseException) -> bool:
        """Raise `error` in the stretch, from another thread; ``False`` where that cannot be done."""
        if not self.is_open:
            return False
        if self._mutex is not None:
            return self._interrupt_thread(self._mutex, error)
        if self._run_soon is not None:
            self._error = error
            self._run_soon(self._throw)
            return True
        if SIGNAL is None or not _is_still_handled(SIGNAL):
            return False
        self._error = error
        signal.pthread_kill(self._ident, SIGNAL)
        return True

    def _interrupt_thread(self, mutex: threading.Lock, error: BaseException) -> bool:
        with mutex:
            if not self.is_open:
                return False
            _await_births()
            # The interpreter takes a class and makes the instance itself.
            self._class, self._has_arrived = _as_class(error, self), False
            _raise_in_thread(self._ident, self._class)
            return True

    def _arrives(self, error: type[BaseException]) -> None:
        """Note that an error has arrived, or hand it on if it came to a thread that had not run yet."""
        if threading.get_ident() == self._ident:
            self._has_arrived = self._has_arrived or error is self._class
        elif self._mutex is not None:
            with self._mutex:
                if self.is_open:
                    _raise_in_thread(self._ident, error)

    def _let_arrive(self) -> None:
        """Have what is on its way to this thread raised here.

        It could be taken back, but the interpreter would go on to look for it at each step, in every
        thread; and in CPython 3.11 a function that is traced or profiled would never begin.
        """
        until = clock.now() + LONGEST_BIRTH
        while clock.now() < until:
            pass

    def _throw(self) -> None:
        """Raise the error in the greenlet, which waits: this runs in the hub."""
        error, self._error = self._error, None
        if self.is_open and error is not None:
            self._greenlet.throw(error)

    def raise_pending(self) -> None:
        """Raise the error if the stretch is still open. Runs in its thread."""
        error, self._error = self._error, None
        if self.is_open and error is not None:
            raise error
        if self._outer is not None:
            self._outer.raise_pending()


def _handle(_number: int, _frame: FrameType | None) -> None:
    if _innermost is not None:
        _innermost.raise_pending()


def _handle_signal(number: signal.Signals) -> None:
    """Have the signal handled from now on; only the main thread can do that."""
    global _is_handled
    signal.signal(number, _handle)
    _is_handled = True


def _is_still_handled(number: signal.Signals) -> bool:
    """Whether nobody else has taken the signal; if so it is taken back for the next stretch."""
    global _is_handled
    _is_handled = signal.getsignal(number) is _handle
    return _is_handled


def _after_fork_in_child() -> None:
    global _main
    _main = threading.main_thread().ident


os.register_at_fork(after_in_child=_after_fork_in_child)


def _as_class(error: BaseException, stretch: Interruptible) -> type[BaseException]:
    args = error.args

    def make(self: BaseException, *_: object) -> None:
        stretch._arrives(type(self))
        type(error).__init__(self, *args)

    fields = {
        "__init__": make,
        "__reduce__": lambda _: (type(error), args),
        # Result backends name the class by these, and readers look it up.
        "__module__": type(error).__module__,
        "__qualname__": type(error).__qualname__,
        _STRETCH: stretch,
    }
    return type(type(error).__name__, (type(error),), fields)


def _await_births() -> None:
    """Let every `threading.Thread` that was started run; for a moment, for one that never does.

    Before Python 3.12 a thread has the id of the one that started it until it runs, and the
    interpreter raises in the first thread that it finds with an id: the newest. One that is not made
    by `threading` may get the error, hands it on, and ends.
    """
    if sys.version_info >= (3, 12):
        return
    until = clock.now() + LONGEST_BIRTH
    while threading._limbo and clock.now() < until:  # type: ignore[attr-defined]
        time.sleep(0.001)


def _raise_in_thread(ident: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error))


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
