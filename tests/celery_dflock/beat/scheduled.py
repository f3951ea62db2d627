"""The app of the beats in the tests, and the record of what each of them has sent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.beat import Scheduler, Service
from celery.schedules import crontab
from celery.signals import after_task_publish, beat_init, before_task_publish

from celery_dflock import LockedTask, SingletonTask

FIRING = "dflock_firing"
"""The header of firings. Written out, for beats of an older release load this module too."""
BROKER = "BEAT_BROKER_URL"
RECORD = "BEAT_RECORD"
INNER = "BEAT_SCHEDULER"
STORE = "BEAT_STORE"
LOCK_TTL = "BEAT_LOCK_TTL"
PREFIX = "BEAT_KEY_PREFIX"
QUEUE = "BEAT_QUEUE"
DIE = "BEAT_DIE"
"""A file: who finds it before sending removes it and dies."""
END = "BEAT_END"
"""A file: who finds it before sending removes it and is asked to end, in a destructor."""

STOP = "BEAT_STOP"
"""A file: who finds it between writing down a firing and sending it removes it and is stopped."""

broker = os.environ.get(BROKER, "memory://")

app = Celery("scheduled", broker=broker, set_as_current=False)
app.conf.update(
    result_backend=broker if "redis" in broker else None,
    dflock_key_prefix=os.environ.get(PREFIX),
    task_default_queue=os.environ.get(QUEUE, "celery"),
    dflock_beat_scheduler=os.environ.get(INNER),
    dflock_beat_store=os.environ.get(STORE),
    dflock_beat_lock_ttl=int(os.environ.get(LOCK_TTL, "3")),
    redbeat_redis_url=broker.replace("redis+socket", "unix"),
    redbeat_redis_options={"retry_period": 1},
    redbeat_key_prefix=os.environ.get(QUEUE, "redbeat"),
    broker_connection_retry_on_startup=True,
    beat_schedule={
        "second": {"task": "second", "schedule": 1.0},
        "minute": {"task": "minute", "schedule": crontab()},
    },
)


def note(what: str, **more: Any) -> None:
    """Add a line of JSON, in one write."""
    event = {"what": what, "at": time.monotonic(), "wall": time.time(), "pid": os.getpid(), **more}
    file = os.open(os.environ[RECORD], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, (json.dumps(event) + "\n").encode())
    finally:
        os.close(file)


@app.task(
    shared=False, base=SingletonTask, name="second", lock_timeout=5, lock_requeue={"base": 0.05}
)
def second() -> None:
    note("run", id=second.request.id)


@app.task(shared=False, base=LockedTask, name="minute")
def minute() -> None:
    note("run", id=minute.request.id)


class Ending:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@before_task_publish.connect
def die(**_: Any) -> None:
    with contextlib.suppress(FileNotFoundError):
        Path(os.environ.get(DIE, "/nowhere")).unlink()
        os.kill(os.getpid(), signal.SIGKILL)


@before_task_publish.connect
def end(**_: Any) -> None:
    with contextlib.suppress(FileNotFoundError):
        Path(os.environ.get(END, "/nowhere")).unlink()
        Ending()


def stopping(cls: type[Scheduler]) -> type[Scheduler]:
    """A scheduler that looks for the file `STOP`."""

    class Stopping(cls):  # type: ignore[misc, valid-type]
        def reserve(self, entry: Any) -> Any:
            after = super().reserve(entry)
            if entry.task == "second":
                with contextlib.suppress(FileNotFoundError):
                    Path(os.environ.get(STOP, "/nowhere")).unlink()
                    note("stopped")
                    os.kill(os.getpid(), signal.SIGSTOP)
            return after

    return Stopping


def __getattr__(name: str) -> type[Scheduler]:
    if name != "StoppingRedBeat":
        raise AttributeError(name)
    from redbeat.schedulers import RedBeatScheduler

    return stopping(RedBeatScheduler)


@after_task_publish.connect
def note_sent(headers: dict[str, Any], **_: Any) -> None:
    if RECORD in os.environ:
        about = headers.get(FIRING) or {}
        note("sent", **{"id": headers["id"], "task": headers["task"], **about})


@beat_init.connect
def note_idling(sender: Service, **_: Any) -> None:
    """Note for how long a leader means to sleep; what is longer than that, the machine took."""
    note("started")
    scheduler = sender.scheduler
    tick = scheduler.tick

    def noted() -> float:
        seconds: float = tick()
        if seconds > 0 and scheduler._inner is not None and scheduler._lock.held:
            note("idles", seconds=seconds)
        return seconds

    scheduler.tick = noted
