"""The Celery application of a chaos run: its jobs, and what is noted about them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.signals import task_failure, task_postrun, task_prerun, task_received, task_success

from celery_dflock import LockedTask, LockLostError, current_lock
from celery_dflock.signals import (
    lock_acquired,
    lock_lost,
    lock_released,
    lock_waiting,
    task_requeued,
    task_superseded,
)
from tests.chaos.history import Recorder
from tests.chaos.options import HISTORY
from tests.chaos.resource import FencedResource
from tests.chaos.section import deadline
from tests.chaos.section import work as section
from tests.chaos.story import IN_CONSUMER

# The environment variables that tell a worker where everything is; also DFLOCK_SERVERS.
BROKER = "CHAOS_BROKER_URL"
DIRECTORY = "CHAOS_DIRECTORY"
LEASE = "CHAOS_LEASE"
WAIT = "CHAOS_WAIT"
VISIBILITY = max(20.0, 4 * float(os.environ.get(LEASE, "0")))
"""Seconds after which Redis delivers again what a dead worker has not acknowledged.

What a worker that is only stopped has not acknowledged as well: longer than a stop and the waits.
"""

app = Celery("tests.chaos.jobs", set_as_current=False)


def configure(env: Mapping[str, str]) -> None:
    app.conf.update(
        broker_url=env.get(BROKER, "memory://"),
        result_backend=env.get(BROKER, "cache+memory://"),
        broker_transport_options={
            "visibility_timeout": VISIBILITY,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
            # A worker that is killed while it looks for what is to be delivered again keeps all others
            # from it for so long: by default five minutes, longer than a run waits for its last task.
            "unacked_mutex_expire": 5,
        },
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        task_acks_late=True,
        # A message can come again after its task has ended, where no lock is in its way.
        worker_deduplicate_successful_tasks=True,
        task_reject_on_worker_lost=True,
    )


configure(os.environ)

waits_in_consumer = os.environ.get(WAIT) == "consumer"


def job(name: str, **options: Any) -> Any:
    """Make a task of a function, as all are here."""
    lease = int(os.environ.get(LEASE, "10"))
    return app.task(
        shared=False,
        bind=True,
        base=LockedTask,
        name=name,
        lock_key="{key}",
        lock_ttl=lease,
        lock_wait="consumer" if waits_in_consumer else "slot",
        lock_timeout=10 if waits_in_consumer else 3,
        lock_requeue={"base": 0.1, "cap": 1.0},
        lock_unique_ttl=lease,
        # Lost while it runs, it begins anew.
        autoretry_for=(LockLostError,),
        retry_kwargs={"countdown": 0.1, "max_retries": None},
        **options,
    )


@job("work")
def work(self: Task, key: str, seconds: float) -> None:
    """Wait for those that came first."""
    use(self, key, seconds)


@job("newest", lock_conflict="supersede")
def newest(self: Task, key: str, seconds: float) -> None:
    """Stop those that came first."""
    use(self, key, seconds)


@job("once", lock_unique="until_executed")
def once(self: Task, key: str, seconds: float) -> None:
    """Be the only one that is on its way."""
    use(self, key, seconds)


def use(self: Task, key: str, seconds: float) -> None:
    """Do under the lock what all do there."""
    lock = of_client(current_lock())
    named = {"who": name(self.request), "key": key, "task": self.request.id}
    recorder().note("started", fence=lock.fence, **named)
    section(recorder(), FencedResource(os.environ[DIRECTORY], recorder()), lock, named, seconds)
    recorder().note("ended", **named)


def of_client(lock: Any) -> Any:
    """Return the lock of the clients that a task's lock is."""
    [of_client] = lock._locks._locks
    return of_client


_recorder: Recorder | None = None
_runs = itertools.count(1)


def recorder() -> Recorder:
    global _recorder
    if _recorder is None:
        _recorder = Recorder(Path(os.environ[DIRECTORY]) / HISTORY)
    return _recorder


def name(request: Any) -> str:
    """The name of this run of a task: each has one of its own."""
    if not hasattr(request, "chaos_name"):
        request.chaos_name = new_name(request)
    return str(request.chaos_name)


def new_name(request: Any) -> str:
    return f"task {request.id[:8]} in {os.getpid()}.{next(_runs)}"


def note(what: Any, request: Any, key: str, **more: Any) -> None:
    recorder().note(what, who=name(request), key=key, task=request.id, **more)


def of_a_worker(signal: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Connect a function to a signal in a worker of a run, and not in whoever sends the tasks."""

    def connect(receiver: Callable[..., None]) -> Callable[..., None]:
        if DIRECTORY in os.environ:
            signal.connect(receiver)  # weakly: functions of a module stay
        return receiver

    return connect


@of_a_worker(task_prerun)
def note_asked(task: Task, kwargs: Mapping[str, Any], **_: Any) -> None:
    if task.app.main == app.main and not waits_in_consumer:
        note("asked", task.request, kwargs["key"])


@of_a_worker(task_received)
def note_asked_in_consumer(request: Any, **_: Any) -> None:
    if request.task.app.main == app.main and waits_in_consumer:
        # It travels to the process that runs the task. A retry that brings it along gets another.
        who = request.request_dict["chaos_name"] = new_name(request)
        key = request.kwargs["key"]
        recorder().note("asked", who=who, key=key, task=request.id, detail=IN_CONSUMER)


@of_a_worker(task_postrun)
def note_gave_up(task: Task, kwargs: Mapping[str, Any], state: Any, **_: Any) -> None:
    if task.app.main == app.main and not getattr(task.request, "chaos_granted", False):
        note("gave_up", task.request, kwargs["key"], detail=str(state))


@of_a_worker(task_success)
def note_done(sender: Task, **_: Any) -> None:
    note("done", sender.request, sender.request.kwargs["key"])


@of_a_worker(task_failure)
def note_failed(sender: Task, exception: BaseException, **_: Any) -> None:
    note("done", sender.request, sender.request.kwargs["key"], detail=repr(exception))


@of_a_worker(lock_waiting)
def note_queued(request: Any, key: str, **_: Any) -> None:
    note("queued", request, key)


@of_a_worker(lock_acquired)
def note_granted(request: Any, lock: Any, **_: Any) -> None:
    name(request)
    request.chaos_granted = True
    note("granted", request, lock.key, fence=lock.fence)


@of_a_worker(lock_released)
def note_released(request: Any, lock: Any, **_: Any) -> None:
    note("released", request, lock.key)


@of_a_worker(lock_lost)
def note_lost(request: Any, key: str, lock: Any, **_: Any) -> None:
    if lock is not None:
        note("lost", request, key, until=deadline(of_client(lock)))


@of_a_worker(task_superseded)
def note_superseded(request: Any, key: str, by: str, **_: Any) -> None:
    note("superseded", request, key, detail=by)


@of_a_worker(task_requeued)
def note_requeued(request: Any, key: str, reason: str, **_: Any) -> None:
    note("requeued", request, key, detail=reason)
