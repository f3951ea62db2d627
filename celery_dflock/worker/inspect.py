"""``celery -A proj inspect dflock``: which locks the tasks of each worker hold or wait for.

In a prefork pool it is the children who hold them, and the main process is who answers. It knows
what its children run and who waits in itself, makes the keys of these tasks as they do, and asks the
lock servers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from celery.app.task import Context
from celery.worker import state as worker_state
from celery.worker.control import inspect_command

from celery_dflock import gate
from celery_dflock.config import settings
from celery_dflock.identity import Owner
from celery_dflock.outcome.header import options_of_call
from celery_dflock.plan import Bound
from celery_dflock.task import LockedTask
from celery_dflock.worker.errands import at_once
from dflockd import clock
from dflockd.admin import describe_pause
from dflockd.errors import DflockdError
from dflockd.rates import describe_rate
from dflockd.sync_client import DistributedLock

PATIENCE = 0.6
"""Seconds for the whole answer. The worker does nothing else meanwhile, and ``celery inspect``
waits for a second."""

Row = dict[str, Any]


class _Question(NamedTuple):
    """A lock that a task of this worker may have; the task's name and id, and the run as owner."""

    lock: DistributedLock
    task: str
    id: str
    owner: Owner

    def is_about(self, entry: Mapping[str, Any]) -> bool:
        """Whether a holder or waiter is this run: nobody else has its owner and attempt at a key.

        Another delivery of the message is refused, wherever it is.
        """
        return self.owner == (entry.get("owner"), entry.get("attempt"))


@inspect_command(name="dflock")
def held_and_awaited(state: Any, **_: Any) -> list[Row]:
    """Locks that the worker's tasks hold or wait for."""
    if not settings(state.app).enabled:
        return []
    deadline = clock.now() + PATIENCE
    wait = getattr(state.consumer, "dflock_wait", None)
    requests = [
        *state.tset(worker_state.active_requests),
        *(wait.requests if wait is not None else ()),
    ]
    questions: dict[str, list[_Question]] = defaultdict(list)
    rows: list[Row] = []

    def prepare() -> None:
        for request in requests:
            try:
                for question in _questions(request):
                    questions[question.lock.server].append(question)
            except Exception as exc:  # the user's function, or arguments that make no key
                rows.append({"task": request.task.name, "id": request.id, "error": str(exc)})

    [is_prepared] = at_once([prepare], deadline)
    if not is_prepared:
        return [*rows, {"error": f"computing lock_key of the tasks took longer than {PATIENCE} s"}]
    answered = at_once([partial(_ask, each, rows) for each in questions.values()], deadline)
    late = [server for server, in_time in zip(questions, answered, strict=True) if not in_time]
    return [*rows, *({"server": server, "error": "no answer in time"} for server in late)]


def _questions(request: Any) -> Iterator[_Question]:
    task = request.task
    if not isinstance(task, LockedTask) or gate.is_of_celery(type(task)):
        return
    context = Context(request.request_dict)
    bound: Bound = task._bound(options_of_call(context))
    asks = bound.owner_of(context)
    for key in bound.keys_of(task, tuple(request.args), request.kwargs):
        yield _Question(bound.make_lock(key), task.name, request.id, asks)


def _ask(questions: Sequence[_Question], rows: list[Row]) -> None:
    """Ask one server, once about each key, and stop at its first failure."""
    by_key: dict[tuple[str, type], list[_Question]] = defaultdict(list)
    for question in questions:
        by_key[question.lock.key, type(question.lock)].append(question)
    for (key, _), about_key in by_key.items():
        lock = about_key[0].lock
        try:
            report = lock.inspect()
        except DflockdError as exc:
            rows.append({"server": lock.server, "error": str(exc)})
            return
        pace = describe_rate(report.get("rate"))
        rate = {"rate": pace.removeprefix("rate: ")} if pace else {}
        paused = report.get("paused")
        pause = {"paused": describe_pause(paused)} if paused else {}
        for state, entries in (("holds", report["holders"]), ("waits", report["waiters"])):
            for place, entry in enumerate(entries, 1):
                for question in about_key:
                    if question.is_about(entry):
                        row = {"key": key, "task": question.task, "id": question.id, "state": state}
                        rows.append({**row, **_details(state, place, entry), **rate, **pause})


def _details(state: str, place: int, entry: Mapping[str, Any]) -> Row:
    if state == "waits":
        row = {"place": place, "waited_s": entry["waited_s"]}
    else:
        row = {field: entry[field] for field in ("fence", "held_s", "lease_expires_in_s")}
    seldom = ("group", "weight", "superseded_by")
    return row | {field: entry[field] for field in seldom if entry.get(field)}
