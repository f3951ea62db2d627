"""The gate at the body of a task: a run without a held lock does not get there.

Celery calls the task, and `LockedTask.__call__`, or what `install` puts around the ``__call__`` of
another base, takes the lock: around all that the bases of the task do, in whatever order they stand. So
a base may call the next one never, once or twice, before or after something, or call ``self.run``.

It may also do so in another thread. Nothing there says which run it belongs to, so the gate finds the
run of that task and these keys which holds its lock now. The lock is kept until the last body has
ended, also if the run that it belongs to has ended before: no other task begins beside it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery import Task, signals
from celery.app.task import Context
from celery.exceptions import ImproperlyConfigured

from celery_dflock.config import settings
from celery_dflock.held import running
from celery_dflock.locks import Locks

logger = logging.getLogger("celery_dflock")


class Run:
    """One run of a task, from before it asks for its lock until after the release.

    Attributes:
        task: the class of the task.
        locks: what its body needs.
        is_waived: whether the body runs without them, since the app says so (``dflock_unavailable``).
        bodies: how many run in other threads.
        has_ended: whether the run itself is over.
    """

    is_waived = False
    bodies = 0
    has_ended = False

    def __init__(self, task: type[Task], locks: Locks) -> None:
        self.task = task
        self.locks = locks


_RUN = "_dflock_run"
"""Where a request has its run. Celery copies that to each request that it pushes in the body."""

_runs: set[Run] = set()
"""The runs of this process whose bodies may begin in another thread."""

_mutex = threading.Lock()
"""Guards `Run.bodies` and `Run.has_ended`: the end of a run against a body that begins elsewhere."""

_called_directly: ContextVar[type[Task] | None] = ContextVar("celery_dflock.direct", default=None)
"""The task that this thread calls as a plain function, if one with other bases."""

workers = 0
"""How many workers live in this process, or lived in the one that it was forked from as it was."""


@signals.worker_init.connect(dispatch_uid="celery_dflock.gate.begin")
def _worker_begins(**_: Any) -> None:
    global workers
    workers += 1


@signals.worker_shutdown.connect(dispatch_uid="celery_dflock.gate.end")
def _worker_ends(**_: Any) -> None:
    global workers
    workers = max(0, workers - 1)


def run_of(request: Context) -> Run | None:
    """Return the run that a request belongs to; ``None`` if that has not begun, or is over."""
    run: Run | None = vars(request).get(_RUN)
    return run


def begin(request: Context, run: Run, *, is_outermost: bool) -> None:
    """Begin a run: its body asks for its lock from now on, in whatever thread another base calls it."""
    setattr(request, _RUN, run)
    if is_outermost:
        _runs.add(run)


def end(run: Run) -> bool:
    """End a run; ``False`` if a body in another thread releases its locks later."""
    if run not in _runs:
        return True  # nearly always
    # Both at once: if a body began between a look at `bodies` and this, its lock would be released
    # under it.
    with _mutex:
        run.has_ended = True
        return not run.bodies


def waive(request: Context) -> None:
    """Let the body of a run begin without a lock, since the app says so."""
    if (run := run_of(request)) is not None:
        run.is_waived = True


def forget(request: Context, run: Run) -> None:
    """Leave nothing behind that refers to a run."""
    vars(request).pop(_RUN, None)
    _runs.discard(run)


ITEMS_OF = {"celery.map": "map", "celery.starmap": "starmap"}
"""The tasks of Celery's own that call another one for each item, and the methods that send them."""


def refuse_items(task: Task, method: str) -> None:
    """Refuse to send many items of a task in one message, as ``map``, ``starmap`` and ``chunks`` do.

    They would be direct calls, without a lock. And a lock that one of them does not get could not be
    waited for by requeueing, since the items before it have been run.

    Raises:
        NotImplementedError: one line says what to send instead.
    """
    if settings(task.app).enabled:
        raise NotImplementedError(
            f"task {task.name}: {method}() would run it without its lock: send "
            f"group(task.s({'item' if method == 'map' else '*item'}) for item in items) instead"
        )


def refuse_of_celery(task: Task, args: tuple[Any, ...]) -> None:
    """Refuse a direct call if it is one of Celery's: of an item, or of an errback with its error.

    For items see `refuse_items`. An errback of several parameters is called as a function where the
    other task has failed; one of one parameter is sent, and locks.

    Raises:
        NotImplementedError: one line says what to do instead.
    """
    caller = task.app.current_task
    if caller is not None and caller.name in ITEMS_OF:
        refuse_items(task, ITEMS_OF[caller.name])
    if args and isinstance(args[0], Context) and settings(task.app).enabled:
        raise NotImplementedError(
            f"task {task.name}: Celery would run it without its lock, since it is a link_error with "
            "several parameters: give it one, the id of the task that has failed"
        )


def is_of_celery(task: type[Task]) -> bool:
    """Whether it is one of Celery's own tasks, which also get the app's default base."""
    return task.__module__.startswith("celery.")


def is_outermost(task: type[Task]) -> bool:
    """Whether the lock of a task surrounds other bases of it; see `install`."""
    return hasattr(vars(task).get("__call__"), "surrounds")


def install(task: type[Task], locked: type[Task]) -> None:
    """Let the lock surround the other bases of a task, and the gate its body.

    Where `locked` is the only base with a ``__call__`` there is no way past it, and nothing to do.

    Raises:
        ImproperlyConfigured: the body is a coroutine function; one line says what to use instead.
    """
    if is_outermost(task) or is_of_celery(task):
        return
    run = inspect.getattr_static(task, "run")
    body = run.__func__ if isinstance(run, staticmethod) else run
    if inspect.iscoroutinefunction(_without_celerys_own(body)):
        raise ImproperlyConfigured(
            f"task {task.name}: it is async def, and its lock would be released before it begins: "
            "use base=Task there, and async with dflock(...) in it"
        )
    callers = [cls for cls in task.__mro__ if callable(vars(cls).get("__call__"))]
    if set(callers) <= {locked, Task}:
        return
    # Setting them is what there is no annotation for.
    setattr(task, "__call__", _outermost(task, task.__call__))  # noqa: B010
    gated = _gated(task, body, is_bound=body is run)
    setattr(task, "run", staticmethod(gated) if body is not run else gated)  # noqa: B010


def _without_celerys_own(function: Any) -> Any:
    """Return what Celery has wrapped, for `pydantic` in the options of a task."""
    while inspect.isfunction(function) and hasattr(function, "__wrapped__"):
        if not function.__globals__["__name__"].startswith("celery."):
            break
        function = function.__wrapped__
    return function


def _outermost(task: type[Task], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        if request.called_directly:
            refuse_of_celery(self, args)
        elif run_of(request) is None:
            return self._run_locked(request, functools.partial(call, self), args, kwargs)
        # A direct call, or one in the body of the task itself: both as Celery does them.
        before = _called_directly.set(task)
        self.push_request(args=args, kwargs=kwargs)
        try:
            return call(self, *args, **kwargs)
        finally:
            self.pop_request()
            _called_directly.reset(before)

    setattr(__call__, "surrounds", call)  # noqa: B010
    return __call__


def _gated(task: type[Task], body: Callable[..., Any], *, is_bound: bool) -> Callable[..., Any]:
    @functools.wraps(body)
    def gated(*args: Any, **kwargs: Any) -> Any:
        # A base may have pushed a request of its own, as Task.__call__ does.
        requests = [each for each in task.request_stack.stack if not each.called_directly]
        if requests:
            check(task, run_of(requests[-1]))
            return body(*args, **kwargs)
        # A plain call, or a program without workers. In a worker any other thread has to show a run.
        if _called_directly.get() is task or not (workers or _runs):
            return body(*args, **kwargs)
        with _in_another_thread(task, args[1:] if is_bound else args, kwargs):
            return body(*args, **kwargs)

    return gated


def check(task: type[Task], run: Run | None) -> None:
    """Return if the lock of a run is certainly held; in doubt, wait until it is certain again.

    Raises:
        LockLostError: it is lost.
        ImproperlyConfigured: it was not asked for yet, or is released.
    """
    if run is None:
        if task._bound().is_locked:
            raise _refused(task, "its run has not asked for its lock, or has ended")
    elif not run.is_waived:
        if run.locks.state == "free":
            raise _refused(task, "its lock is not held")
        # Now, and not when the lock was granted: other bases may have taken longer than the lease.
        run.locks.check()


@contextmanager
def _in_another_thread(
    task: type[Task], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Run a body that a base has moved to this thread, and keep its lock until it has ended."""
    run = _find(task, args, kwargs)
    if run is None:
        yield
        return
    try:
        check(task, run)
        before = running.set(run.locks)
        try:
            yield
        finally:
            running.reset(before)
    finally:
        # The run is over, and has left its lock to the last of its bodies.
        with _mutex:
            run.bodies -= 1
            is_last = run.has_ended and not run.bodies
        if is_last:
            run.locks.release()


def _find(task: type[Task], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
    """Return the run of this process that a body belongs to, counted in; ``None`` if it needs none."""
    bound = task._bound()
    if not bound.is_locked:
        return None
    names = bound.keys_of(task.app.tasks[bound.name], args, kwargs)
    with _mutex:
        for run in tuple(_runs):
            if run.task is task and run.locks.keys == names and not run.has_ended:
                run.bodies += 1
                return run
    if not workers:
        return None  # a plain call, as in a test
    error = _refused(task, f"no run that goes on holds {', '.join(map(repr, names))}")
    logger.error("%s", error)  # who made the thread may not look
    raise error


def _refused(task: type[Task], why: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(
        f"task {task.name}: its body was called without its lock: {why}; let its bases call"
        " super().__call__(*args, **kwargs) with the arguments of the task, and wait until it has"
        " ended"
    )
