"""The identity of a run: the owner, for the lock server to compare, and the label, for people."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import blake2b
from typing import TypeAlias

from celery.utils.nodenames import gethostname

Owner: TypeAlias = tuple[str, int]
"""Which run, and which attempt of it: a retry is a later one, and so not another delivery."""

AgedOwner: TypeAlias = tuple[str, int, int]
"""The same, and its age, by which the newest wins."""


def runs_of(task_name: str, prefix: str) -> Callable[[str, int, str, int], Owner]:
    """Return what says who a run of a task is, wherever its message is delivered.

    It is given the id of the task, the number of the attempt and the audience: of a message that each
    worker gets, which of them; else nothing. `Task.replace` keeps the id, so that the name counts as
    well, and how often it was called; `prefix` keeps applications apart.
    """
    begun = blake2b(f"{prefix}\0{task_name}\0".encode("utf-8", "surrogatepass"), digest_size=16)

    def owner(task_id: str, attempt: int, audience: str, nesting: int) -> Owner:
        digest = begun.copy()
        # An id may be a UUID: Celery sends it as it is.
        place = f"\0{nesting}" if nesting else ""
        digest.update(f"{task_id}\0{audience}{place}".encode("utf-8", "surrogatepass"))
        return digest.hexdigest(), attempt

    return owner


def label_of(task_name: str, task_id: str, does: str = "") -> str:
    """Return the label of a run of a task, shown to people who ask who holds a lock.

    Args:
        task_name: the name of the task.
        task_id: the id of the task.
        does: what it does there, and a space behind it, if the lock is not the task's own.
    """
    return f"{task_name}[{task_id}] {does}{_process or process_label()}"


def process_label() -> str:
    """Return the host and pid of this process."""
    global _process
    if _process is None:
        _process = f"{gethostname()} pid {os.getpid()}"
    return _process


_process: str | None = None


def _forget_process() -> None:
    global _process
    _process = None


os.register_at_fork(after_in_child=_forget_process)
