"""What becomes of a task that cannot have its lock."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from typing import Any, NoReturn, TypedDict

from celery import Task, states
from celery.app.task import Context
from celery.exceptions import Ignore, Retry

from celery_dflock.exceptions import LockError, LockNotAcquiredError
from celery_dflock.options import Backoff, LockOptions
from celery_dflock.signals import task_deduplicated, task_requeued, task_skipped
from dflockd.sync_client import Reservation

# The system's: no new seed after a fork, and nothing taken from a seed that somebody has set.
_chance = random.SystemRandom()

HEADER = "dflock"
"""The message header of a call's own options, and of the counters of a requeued task: a dict."""

COUNTERS = ("attempt", "since", "place", "retries", "copy", "free")

RESULT_PATIENCE = 0.2
"""Seconds between a copy's finding the lock free and its running: a result is stored after that."""

UNIQUE = "unique"
"""The place in the header for the lock that keeps others like this task from being sent."""

HANDED = "dflock_handed"
"""The place in a request for what the consumer of this worker hands to the process that runs it."""

logger = logging.getLogger("celery_dflock")


class Handed(TypedDict, total=False):
    """What came of a task's waiting in the consumer; see `celery_dflock.parked`.

    With a token the lock is held. With `error` it could not be asked for. A copy has found its own
    message in its way. With none of these it was not granted in time; then the place that was kept
    for the task and the pause for which that was done, if it was.
    """

    key: str
    token: str
    error: str
    is_copy: bool
    waited: float
    """Seconds."""
    place: str
    pause: float


class Ticket:
    """The place in the queue of its lock that a task has while it is requeued.

    Attributes:
        place: its name, if there is one to be taken up; then that under which it was kept.
        pause: seconds until the next attempt, if they have been said to the lock server.
    """

    def __init__(self, request: Context, backoff: Backoff, timeout: float | None) -> None:
        self._request = request
        self._backoff = backoff
        self._timeout = timeout or 0.0
        self.place: str | None = attempts(request).get("place")
        self.pause: float | None = None

    @classmethod
    def of(
        cls, request: Context, options: LockOptions, keys: int, timeout: float | None
    ) -> Ticket | None:
        """Return that of a task whose place is to be kept; ``None`` for others.

        Who decides with a function, once the wait is over, may decide for something else.
        """
        is_kept = options.conflict == "requeue" and options.requeue.hold is not None
        if not is_kept or keys > 1 or request.is_eager:
            return None
        return cls(request, options.requeue, timeout)

    def keep(self) -> Reservation | None:
        """Draw the pause, before a wait of `timeout` seconds; ``None`` if there will be none."""
        end = time.time() + self._timeout
        attempt, since = _attempt(attempts(self._request), end)
        if self._backoff.is_over(attempt, end - since):
            return None
        self.pause = _pause(self._backoff, attempt)
        return Reservation(self.pause, self._backoff.hold or 0.0)


class Skipped(dict[str, Any]):
    """The result of a task that was skipped because its lock was held.

    A task that is skipped ends as ``SUCCESS`` with this value: nobody waits for ever, and a chord
    goes on. It is a dict, so that every serialiser can store it and readers need not know the
    plugin; `Skipped.of` recognises it again.
    """

    MARK = "dflock"

    def __init__(self, key: str, task_id: str | None, holder: str | None = None) -> None:
        super().__init__({self.MARK: "skipped", "key": key, "task_id": task_id, "holder": holder})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the arguments."""
        return type(self), (self.key, self.task_id, self.holder)

    @property
    def key(self) -> str:
        """The lock that was not free."""
        return str(self["key"])

    @property
    def task_id(self) -> str | None:
        """The task that was skipped."""
        task_id: str | None = self["task_id"]
        return task_id

    @property
    def holder(self) -> str | None:
        """Who held the lock, as the holder describes itself, if that could be learned."""
        holder: str | None = self["holder"]
        return holder

    @classmethod
    def of(cls, result: object) -> Skipped | None:
        """Return `result` as `Skipped` if that is what a task returned, else ``None``."""
        if isinstance(result, dict) and result.get(cls.MARK) == "skipped":
            return cls(result["key"], result["task_id"], result.get("holder"))
        return None


def attempts(request: Context) -> dict[str, Any]:
    """Return what the header says of earlier attempts, or nothing at the first.

    A retry inherits the header of the run that sent it. That run had its lock, so counting starts
    anew.
    """
    history = _header(request)
    if history.get("retries") != request.retries:
        return {}
    return {name: history[name] for name in COUNTERS if name in history}


def options_of_call(request: Context) -> dict[str, Any]:
    """Return the options that this call names itself."""
    ours = (*COUNTERS, UNIQUE)
    return {name: value for name, value in _header(request).items() if name not in ours}


def take_handed(request: Context) -> Handed | None:
    """Take out of a request what the consumer has put there: nobody else is to come across it."""
    if request.headers:
        request.headers.pop(HANDED, None)
    handed: Handed | None = vars(request).pop(HANDED, None)
    return handed


def has_lost_place(handed: Handed) -> bool:
    """Whether a lock was granted: if it is held by another now, the time to wait is not over."""
    return "token" in handed


def unique_of(request: Context) -> dict[str, str] | None:
    """Return what `celery_dflock.unique` has sent along: ``key``, ``token``, ``until`` and ``id``.

    Only if it is this task's, for headers are handed on to other tasks. A sender of 0.1 that had just
    lost the lock sent no token.
    """
    ours = _header(request).get(UNIQUE)
    if not isinstance(ours, dict) or ours.get("id") != request.id or not ours.get("token"):
        return None
    return ours


def _uncounted(request: Context) -> dict[str, Any]:
    return {name: value for name, value in _header(request).items() if name not in COUNTERS}


def _header(request: Context) -> Mapping[str, Any]:
    headers = request.headers
    return (headers and headers.get(HEADER)) or {}


def requeue(
    task: Task, error: LockError, backoff: Backoff, ticket: Ticket | None = None
) -> NoReturn:
    """Send the task again, to run a while later, and end this run of it.

    The same task: id, group, chord, chain, headers, priority and queue stay, and no retry is used
    up. Published first, acknowledged after: it can be doubled by a crash, never lost.

    With a ticket it takes along its place in the queue of its lock. Without one it has not got to
    waiting: if it had a place from before, it will look for it the next time.

    Raises:
        Retry: which tells Celery that the task goes on elsewhere.
        LockNotAcquiredError: it has been tried for too long.
        LockError: `error` itself, in eager mode: there is nowhere to send the task to.
    """
    request = task.request
    if request.is_eager:
        raise error
    history = attempts(request)
    now = time.time()
    attempt, since = _attempt(history, now)
    if backoff.is_over(attempt, now - since):
        why = f"gave up after {attempt} attempts in {now - since:.0f} s: {error.reason}"
        raise LockNotAcquiredError(error.key, why) from error
    countdown = _pause(backoff, attempt)
    if ticket is not None:
        countdown = countdown if ticket.pause is None else ticket.pause
        history["place"] = ticket.place
    _send_again(task, countdown, {**history, "attempt": attempt, "since": since})
    logger.info(
        "task %s[%s] requeued for %.1f s, attempt %d: %s",
        task.name,
        request.id,
        countdown,
        attempt,
        error,
    )
    _tell_requeued(task, error, countdown, attempt)
    raise Retry(f"requeued for {countdown} s: {error}", exc=error, when=countdown)


def _attempt(history: Mapping[str, Any], now: float) -> tuple[int, float]:
    """Return the number of this attempt, and since when it has been tried."""
    return int(history.get("attempt", 0)) + 1, float(history.get("since", now))


def _pause(backoff: Backoff, attempt: int) -> float:
    return round(backoff.pause(attempt - 1, _chance.random()), 3)


def _send_again(task: Task, countdown: float, counters: dict[str, Any]) -> None:
    request = task.request
    own = {**_uncounted(request), **counters, "retries": request.retries}
    task.signature_from_request(
        request,
        retries=request.retries,
        countdown=countdown,
        headers={**(request.headers or {}), HEADER: own},
    ).apply_async()


def _tell_requeued(task: Task, error: LockError, countdown: float, attempt: int) -> None:
    task_requeued.send(
        sender=task,
        request=task.request,
        key=error.key,
        reason=error.reason,
        countdown=countdown,
        attempt=attempt,
    )


# Copies: brokers deliver a message again while the task runs, under the same id.


class CopyRequeued(Ignore):
    """A copy was sent again. It is not the end of the task, whose other run goes on."""


def run_name(task: Task, request: Any = None) -> str:
    """Return what every run of a message calls itself, copies included; by default the current one."""
    return f"{task.name}[{(request or task.request).id}] "


def is_known_copy(request: Context) -> bool:
    """Whether the broker says that it delivered this before, or an earlier attempt found out."""
    redelivered = (request.delivery_info or {}).get("redelivered")
    return bool(redelivered) or is_marked_copy(request)


def is_marked_copy(request: Context) -> bool:
    """Whether an earlier attempt found a run of its own message under way."""
    return "copy" in attempts(request)


def is_copy_of_holder(task: Task, error: LockNotAcquiredError) -> bool:
    """Whether it was a run of this very message that refused the lock; in doubt it was."""
    if error.holder is None:
        return is_known_copy(task.request)
    return error.holder.startswith(run_name(task))


def requeue_copy(task: Task, error: LockNotAcquiredError, backoff: Backoff) -> NoReturn:
    """Send a copy of a task that runs again, and end this run of it without any result.

    The result under the id they share is that of the run that holds the lock. It never gives up:
    that would be a result.

    Raises:
        CopyRequeued: which tells Celery to store nothing.
        LockError: `error` itself, in eager mode.
    """
    request = task.request
    if request.is_eager:
        raise error
    number = int(attempts(request).get("copy", 0)) + 1
    countdown = _pause(backoff, number)
    _send_again(task, countdown, {"copy": number})
    logger.log(
        logging.WARNING if number == 1 else logging.INFO,
        "task %s[%s] was delivered again while it runs; the copy is requeued for %.1f s: %s%s",
        task.name,
        request.id,
        countdown,
        error,
        ". Is visibility_timeout shorter than the task?" if number == 1 else "",
    )
    _tell_requeued(task, error, countdown, number)
    raise CopyRequeued


def drop_ended_copy(task: Task, key: str) -> None:
    """End this run if it is a copy that has waited for another, and that has ended with a result.

    Raises:
        Ignore: it is; nothing is stored, so that the result stays as the sender knows it.
        CopyRequeued: it is too early to say.
    """
    request = task.request
    if not is_marked_copy(request):
        return
    state = _stored_state(task)
    if state not in states.READY_STATES and "free" not in attempts(request):
        # The run may have ended this very moment: it gives its lock back, then stores its result.
        _send_again(task, RESULT_PATIENCE, {**attempts(request), "free": True})
        logger.info("task %s[%s]: its copy looks for a result once more", task.name, request.id)
        raise CopyRequeued
    if state not in states.READY_STATES:
        logger.warning(
            "task %s[%s] runs again: it was delivered twice, and no result (%s) says that the "
            "other run has ended",
            task.name,
            request.id,
            state,
        )
        return
    logger.info("task %s[%s] ended as %s: its copy is dropped", task.name, request.id, state)
    task_deduplicated.send(
        sender=task, request=request, key=key, task_id=request.id, verdict="copy"
    )
    raise Ignore


def _stored_state(task: Task) -> str:
    if not task.backend.persistent:
        return "not stored"
    try:
        return str(task.AsyncResult(task.request.id).state)
    except Exception as exc:  # whatever it is, nobody has said that the task has ended
        return repr(exc)


def skip(task: Task, error: LockNotAcquiredError) -> Skipped:
    """Return the result of a skipped run."""
    request = task.request
    logger.info("task %s[%s] skipped: %s", task.name, request.id, error)
    task_skipped.send(sender=task, request=request, key=error.key, holder=error.holder)
    return Skipped(error.key, request.id, error.holder)
