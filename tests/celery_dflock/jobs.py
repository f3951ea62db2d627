"""The tasks of the tests, as a module that workers import."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.signals import task_prerun

from celery_dflock import (
    Lock,
    LockedTask,
    LockLostError,
    LockNotAcquiredError,
    SingletonTask,
    current_lock,
    require_lock,
)
from celery_dflock.signals import (
    lock_acquired,
    lock_lost,
    lock_waiting,
    task_deduplicated,
    task_requeued,
    task_skipped,
    task_superseded,
)
from tests.celery_dflock.bodies import ASIDE as ASIDE
from tests.celery_dflock.bodies import (
    LONG,
    SHORT,
    SOON,
    body,
    body_of_call,
    limited_body,
    weighed_body,
)
from tests.celery_dflock.record import note

# The environment variables that tell a worker where everything is; also DFLOCK_SERVERS.
BROKER = "JOBS_BROKER_URL"
RESULTS = "JOBS_RESULT_BACKEND"
"""Where results go, if that is not the broker."""
MORE = "JOBS_SETTINGS"
"""More settings of the app, as JSON."""
WAIT = "JOBS_WAIT"
MAX_WAITING = "JOBS_MAX_WAITING"
SLOW = "JOBS_SLOW"
"""Seconds that a receiver of `lock_waiting` takes."""
SOFT = "JOBS_SOFT_SHUTDOWN"
"""Seconds of a soft shutdown."""
VISIBILITY = "JOBS_VISIBILITY"
"""Seconds after which Redis delivers again what a worker has not acknowledged."""

TOLD_MS = "JOBS_TOLD_MS"
"""Milliseconds for which a lock is set aside for a task whose turn has come in the consumer."""

ASK_AGAIN = "JOBS_ASK_AGAIN"
"""Seconds without a turn after which a worker asks for one on another connection."""

PENDING = {TOLD_MS: "TURN_MS", ASK_AGAIN: "ASK_AGAIN"}
"""What these are of pending acquires."""

AT_ONCE = {"base": 0.05, "cap": 0.05}

app = Celery("tests.celery_dflock.jobs", set_as_current=False)


def configure(env: Mapping[str, str]) -> None:
    app.conf.update(
        broker_url=env.get(BROKER, "memory://"),
        result_backend=env.get(RESULTS) or env.get(BROKER, "cache+memory://"),
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"priority_steps": [0, 3, 6, 9]},
        result_extended=True,
        worker_soft_shutdown_timeout=float(env.get(SOFT, "0")),
        dflock_wait=env.get(WAIT, "slot"),
        dflock_max_waiting=int(env.get(MAX_WAITING, "500")),
    )
    if VISIBILITY in env:
        app.conf.broker_transport_options |= {
            "visibility_timeout": float(env[VISIBILITY]),
            "unacked_restore_interval": 0.1,
            "unacked_restore_throttle": 1,
            # What other workers have not acknowledged is none of its business.
            "unacked_key": "impatient_unacked",
            "unacked_index_key": "impatient_unacked_index",
            "unacked_mutex_key": "impatient_unacked_mutex",
            # Who is killed while it looks, or whose broker is, keeps out others for so many seconds.
            "unacked_mutex_expire": 3,
        }
    app.conf.update(json.loads(env.get(MORE, "{}")))
    for variable, name in PENDING.items():
        if variable in env:
            setattr(import_module("dflockd.client.pending"), name, json.loads(env[variable]))


configure(os.environ)


# The tasks: one body, under locks with different options.


_names: set[str] = set()


def job(
    name: str, base: type[Task] = LockedTask, body: Callable[..., Any] = body, **options: Any
) -> Task:
    assert name not in _names, f"{name} is there already: Celery would take the first for both"
    _names.add(name)
    if issubclass(base, LockedTask) and base is not SingletonTask:
        options = {"lock_key": "{key}", "lock_ttl": LONG, "lock_requeue": AT_ONCE, **options}
    return app.task(bind=True, shared=False, base=base, name=name, **options)(body)


plain = job("plain", base=Task)
patient = job("patient", lock_timeout=LONG)
requeued = job("requeued", lock_timeout=0, max_retries=2)
limited = job("limited", lock_timeout=0, lock_requeue={**AT_ONCE, "max_attempts": 3})
hurried = job("hurried", lock_timeout=0, lock_requeue={**AT_ONCE, "max_wait": 0.2})
skipped = job("skipped", lock_timeout=0, lock_conflict="skip")
failed = job(
    "failed",
    lock_timeout=0,
    lock_conflict="fail",
    # Retries what the body raises, and nothing that the lock has to say.
    autoretry_for=(Exception,),
    retry_kwargs={"countdown": 0, "max_retries": 5},
)
NEVER_RETRIED = {
    "lock_timeout": LONG,
    "autoretry_for": (Exception,),
    "retry_kwargs": {"countdown": 0, "max_retries": 5},
}
latest = job("latest", lock_conflict="supersede", **NEVER_RETRIED)
latest_parked = job(
    "latest_parked", lock_wait="consumer", lock_conflict="supersede", **NEVER_RETRIED
)
latest_late = job("latest_late", lock_conflict="supersede", acks_late=True, **NEVER_RETRIED)
latest_skipped = job("latest_skipped", lock_conflict=("supersede", "skip"), lock_timeout=1)
last = job("last", lock_conflict="newest", **NEVER_RETRIED)
last_parked = job("last_parked", lock_wait="consumer", lock_conflict="newest", **NEVER_RETRIED)
last_late = job("last_late", lock_conflict="newest", acks_late=True, **NEVER_RETRIED)
last_skipped = job("last_skipped", lock_conflict=("newest", "skip"), lock_timeout=1)
last_failed = job("last_failed", lock_conflict=("newest", "fail"), lock_timeout=1)
retried = job(
    "retried", autoretry_for=(ValueError,), retry_kwargs={"countdown": 0, "max_retries": 1}
)
short = job("short", lock_ttl=SHORT, lock_timeout=LONG)
warned = job("warned", lock_ttl=1, lock_timeout=LONG, lock_lost="warn")


class TwiceTask(Task):
    """A base in front of the lock that calls the body again, as after a stale connection."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        super().__call__(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class MovedTask(Task):
    """A base in front of the lock that calls the body in another thread, as a time limit does."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(super().__call__, *args, **kwargs).result()


class TwiceLocked(TwiceTask, LockedTask):
    abstract = True


class MovedLocked(MovedTask, LockedTask):
    abstract = True


twice = job("twice", base=TwiceLocked, lock_timeout=LONG)


@app.task(name="moved", shared=False, base=MovedLocked, lock_key="{key}")
def moved(key: str) -> list[Any]:
    lock = current_lock()
    return [lock.key, lock.held] if lock is not None else []


def _checked(self: Task, key: str, gate: str) -> str:
    """Come into doubt, let the lock say how that ends, and go on until the file `gate` is there."""
    lock = current_lock()
    assert lock is not None

    def note_lock(what: str, **more: Any) -> None:
        note(what, self, key=key, state=lock.state, held=lock.held, fence=lock.fence, **more)

    note_lock("start")
    while lock.state == "held":
        time.sleep(0.005)
    note_lock("doubt", has_token=lock.token is not None)
    lock.check()
    note_lock("checked", has_token=lock.token is not None)
    while not Path(gate).exists():
        time.sleep(0.005)
    note_lock("end")
    return str(self.request.id)


CHECKED = {"bind": True, "base": LockedTask, "lock_key": "{key}"}
checked = app.task(shared=False, name="checked", **CHECKED)(_checked)
checked_alone = app.task(shared=False, name="checked_alone", lock_lost="warn", **CHECKED)(_checked)


def _in_region(self: Task, number: int, key: str, gate: str) -> str:
    """Say which lock it holds, and go on until the file `gate` is there."""
    note("start", self, key=key)
    while not Path(gate).exists():
        time.sleep(0.005)
    return require_lock().key


in_region = app.task(
    bind=True, base=LockedTask, shared=False, name="in_region", lock_key="{key}:{number}"
)(_in_region)

two_keys = job("two_keys", lock_key=["{key}:b", "{key}:a"], lock_timeout=LONG)
by_locks = job(
    "by_locks",
    lock_key=[Lock("{key}:fleet", limit=3), Lock("{key}:vendor", limit=2, rate="5/h"), "{key}"],
    lock_ttl=SOON,
    lock_timeout=LONG,
)
by_locks_backwards = job(
    "by_locks_backwards",
    lock_key=["{key}", Lock("{key}:vendor", limit=2, rate="5/h"), Lock("{key}:fleet", limit=3)],
    lock_timeout=LONG,
)
by_two_names = job(
    "by_two_names",
    lock_key=[Lock("{key}:vendor", limit=3, rate="5/h"), Lock("{key}:{limit}", limit=2)],
    lock_timeout=LONG,
    body=limited_body,
)
by_second_limit = job(
    "by_second_limit",
    lock_key=["{key}", Lock("{key}:vendor", limit="{limit.seats}", rate="5/h")],
    lock_timeout=LONG,
    body=limited_body,
)
by_two_names_of = job(
    "by_two_names_of",
    lock_key=["{key}", Lock("{key}:{limit.name}", limit=3)],
    lock_timeout=LONG,
    body=limited_body,
)
by_twos = job("by_twos", lock_limit=2, lock_timeout=LONG)
singleton = job("singleton", base=SingletonTask)


def limit_of(_task: Task, _args: Any, kwargs: Mapping[str, Any]) -> Any:
    return kwargs["limit"]


by_template = job("by_template", lock_limit="{limit}", lock_timeout=LONG, body=limited_body)
by_function = job("by_function", lock_limit=limit_of, lock_timeout=LONG, body=limited_body)
parked_by_function = job(
    "parked_by_function",
    lock_limit=limit_of,
    lock_timeout=LONG,
    lock_wait="consumer",
    body=limited_body,
)


def weight_of(_task: Task, _args: Any, kwargs: Mapping[str, Any]) -> Any:
    return kwargs["weight"]


READ: dict[str, Any] = {"lock_limit": 100, "lock_timeout": LONG}
WRITE = {**READ, "lock_weight": "all"}
read = job("read", **READ)
write = job("write", **WRITE)
parked_read = job("parked_read", lock_wait="consumer", **READ)
parked_write = job("parked_write", lock_wait="consumer", **WRITE)
GPUS: dict[str, Any] = {"lock_limit": 8, "lock_timeout": LONG, "body": weighed_body}
by_weight = job("by_weight", lock_weight=weight_of, **GPUS)
parked_by_weight = job("parked_by_weight", lock_wait="consumer", lock_weight="{weight}", **GPUS)


def decide(_task: Task, error: LockNotAcquiredError) -> str:
    return f"instead of {error.key}"


decided = job("decided", lock_timeout=0, lock_conflict=decide)


stubborn = job(
    "stubborn",
    lock_timeout=LONG,
    autoretry_for=(LockLostError,),
    retry_kwargs={"countdown": 0, "max_retries": None},
)


def acked_late(name: str, **options: Any) -> Task:
    """A task whose message is acknowledged after it has run, and delivered again if its child dies."""
    options = {"lock_timeout": 0, "acks_late": True, "reject_on_worker_lost": True, **options}
    return job(name, **options)


late_requeued = acked_late("late_requeued", lock_requeue={**AT_ONCE, "max_attempts": 2})
late_skipped = acked_late("late_skipped", lock_conflict="skip")
late_seldom = acked_late("late_seldom", lock_requeue={"base": 3.0, "cap": 3.0})
late_failed = acked_late("late_failed", lock_conflict="fail")
late_decided = acked_late("late_decided", lock_conflict=decide)
late_patient = acked_late("late_patient", lock_timeout=LONG)
late_by_twos = acked_late("late_by_twos", lock_limit=2)
late_untold = acked_late("late_untold", ignore_result=True)

# Tasks that wait in the consumer.

parked = job("parked", lock_wait="consumer", lock_timeout=LONG)
parked_unique = job(
    "parked_unique",
    lock_wait="consumer",
    lock_timeout=LONG,
    lock_unique="until_executed",
    lock_unique_ttl=2,
)
parked_short = job("parked_short", lock_wait="consumer", lock_timeout=1, lock_conflict="skip")
parked_again = job(
    "parked_again", lock_wait="consumer", lock_timeout=1, lock_requeue={"base": 0.05, "cap": 0.05}
)
parked_by_twos = job("parked_by_twos", lock_wait="consumer", lock_timeout=LONG, lock_limit=2)
parked_lease = job("parked_lease", lock_wait="consumer", lock_timeout=LONG, lock_ttl=1)
parked_late = acked_late("parked_late", lock_wait="consumer", lock_timeout=LONG)
parked_two_keys = job(
    "parked_two_keys", lock_wait="consumer", lock_timeout=LONG, lock_key=["{key}:b", "{key}:a"]
)
parked_endless = job("parked_endless", lock_wait="consumer", lock_timeout=None)
PAIR: dict[str, Any] = {"lock_wait": "consumer", "lock_timeout": LONG}
parked_one = job("parked_one", lock_key="{key}:a", **PAIR)
PAIR_KEYS = ["{key}:a", "{key}:b"]
parked_pair = job("parked_pair", lock_key=PAIR_KEYS, **PAIR)
THREE = [Lock("{key}:fleet", limit=3), Lock("{key}:vendor", limit=2, rate="5/h"), "{key}"]
parked_three = job("parked_three", lock_key=THREE, lock_ttl=SOON, **PAIR)
parked_shares = job(
    "parked_shares",
    lock_key=[Lock("{key}:gpu", limit=8, weight=3), Lock("{key}:report", limit=100, weight="all")],
    **PAIR,
)
parked_three_late = job("parked_three_late", lock_key=THREE, acks_late=True, **PAIR)
parked_pair_lease = job("parked_pair_lease", lock_key=PAIR_KEYS, **PAIR, lock_ttl=SHORT)
parked_pair_short = job(
    "parked_pair_short", **{**PAIR, "lock_timeout": 1}, lock_key=PAIR_KEYS, lock_conflict="skip"
)
four = job(
    "four",
    lock_key=[
        Lock("{key}:account:{account}"),
        Lock("{key}:vendor:{vendor}", limit=3, rate=(8, 1.0)),
        Lock("{key}:fleet", limit=5),
    ],
    acks_late=True,
    reject_on_worker_lost=True,
    body=body_of_call,
    **PAIR,
)
four_in_turns = job(
    "four_in_turns",
    lock_key=[
        Lock("{key}:vendor:{vendor}", limit=3, rate=(8, 1.0), group="{account}", group_limit=1),
        Lock("{key}:fleet", limit=5, weight="{weight}"),
    ],
    acks_late=True,
    reject_on_worker_lost=True,
    body=body_of_call,
    **PAIR,
)
parked_strict = job("parked_strict", lock_wait="consumer", lock_timeout=LONG, lock_conflict="fail")
parked_slowly = job("parked_slowly", lock_wait="consumer", lock_timeout=LONG, rate_limit="5/s")


# Tasks that keep their places while they are requeued.

LONG_HOLD = {"base": 0.5, "cap": 0.5, "hold": 10}

ticket = job("ticket", lock_timeout=0, lock_requeue=LONG_HOLD)
ticket_patient = job("ticket_patient", lock_timeout=0.5, lock_requeue=LONG_HOLD)
ticket_parked = job("ticket_parked", lock_wait="consumer", lock_timeout=0.5, lock_requeue=LONG_HOLD)
ticket_by_twos = job("ticket_by_twos", lock_timeout=0, lock_limit=2, lock_requeue=LONG_HOLD)
ticket_weighed = job(
    "ticket_weighed", lock_timeout=0, lock_limit=3, lock_weight=2, lock_requeue=LONG_HOLD
)
ticket_short = job("ticket_short", lock_timeout=0, lock_requeue={**AT_ONCE, "hold": 1})
ticket_none = job("ticket_none", lock_timeout=0, lock_requeue={**AT_ONCE, "hold": None})
ticket_decided = job(
    "ticket_decided",
    lock_timeout=0,
    lock_conflict=lambda _task, _error: "requeue",
    lock_requeue=LONG_HOLD,
)
ticket_two_keys = job(
    "ticket_two_keys", lock_timeout=0, lock_key=["{key}:b", "{key}:a"], lock_requeue=LONG_HOLD
)


@app.task(name="collect", shared=False, bind=True)
def collect(self: Task, results: list[Any], key: str) -> list[Any]:
    note("collected", self, key=key, results=results)
    return results


@task_prerun.connect
def note_asked(task: Task, kwargs: Mapping[str, Any], **_: Any) -> None:
    """A process has taken the task up; a locked task asks for its lock now."""
    if task.app.main == app.main:
        note("asked", task, key=kwargs.get("key"))


@lock_acquired.connect
def remember_acquired(request: Any, **_: Any) -> None:
    """For the note of the start, which may come much later on a busy machine."""
    request.acquired_at = time.monotonic()


@task_requeued.connect
def note_requeued(
    sender: Task, key: str, reason: str, countdown: float, attempt: int, **_: Any
) -> None:
    note("requeued", sender, key=key, reason=reason, countdown=countdown, attempt=attempt)


@task_deduplicated.connect
def note_deduplicated(sender: Task, key: str, **_: Any) -> None:
    note("deduplicated", sender, key=key)


@task_skipped.connect
def note_skipped(sender: Task, key: str, **_: Any) -> None:
    note("skipped", sender, key=key)


@lock_waiting.connect
def be_slow(**_: Any) -> None:
    if SLOW in os.environ:
        time.sleep(float(os.environ[SLOW]))


@task_superseded.connect
def note_superseded(sender: Task, key: str, by: str, was_running: bool, **_: Any) -> None:
    note("superseded", sender, key=key, by=by, was_running=was_running)


@lock_lost.connect
def note_lost(sender: Task, key: str, **_: Any) -> None:
    note("lost", sender, key=key)


# Tasks that are not sent twice.


def unique(name: str, until: str, duplicate: str = "coalesce", **options: Any) -> Task:
    # Tried again soon: with what is usual a busy machine, where it is tried often, would wait for long.
    waits = {"lock_timeout": 0, "lock_requeue": {"base": 0.2, "cap": 1}}
    return job(name, **{**waits, "lock_unique": until, "lock_duplicate": duplicate, **options})


until_executing = unique("until_executing", "until_executing")
until_executed = unique("until_executed", "until_executed")
until_expired = unique("until_expired", "until_expired", lock_unique_ttl=LONG)
unique_patient = unique("unique_patient", "until_executed", lock_timeout=LONG)
unique_waiting = unique("unique_waiting", "until_executing", lock_timeout=LONG)
unique_skipped = unique("unique_skipped", "until_executed", lock_conflict="skip")
unique_failed = unique("unique_failed", "until_executed", lock_conflict="fail")
unique_retried = unique(
    "unique_retried",
    "until_executed",
    autoretry_for=(ValueError,),
    retry_kwargs={"countdown": 0.5, "max_retries": 1},
)
unique_late = unique("unique_late", "until_executed", acks_late=True)
raising = unique("raising", "until_executed", "raise")
skipping = unique("skipping", "until_executed", "skip")
replacing = unique("replacing", "until_executed", "replace", lock_timeout=LONG)
replacing_queued = unique("replacing_queued", "until_executing", "replace", lock_timeout=LONG)
