"""What happened: an append-only file of JSON lines that all processes of a run share.

Times are `time.monotonic_ns()`, one clock for all processes of a machine. A process in a time
namespace of its own has it shifted by a constant, which is taken out here.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

What = Literal[
    # One attempt to get a lock, in this order. `who` is its name.
    "asked",  # about to send the request
    "queued",  # has a place in the queue for certain
    "granted",
    "begin",  # the critical section
    "renewed",
    "end",
    "lost",  # was told so by its client
    "released",
    "gave_up",  # was not granted, whatever the reason
    # The fenced resource, in the order in which it saw them.
    "accepted",
    "refused",
    # Tasks, by `task`.
    "sent",
    "started",
    "ended",
    "done",  # its result is stored
    "requeued",
    "superseded",  # by a newer one, which is the `detail`
    # What the driver did. `group` names the processes.
    "died",
    "stopping",  # a worker that was asked to end
    "fault",
    "broken",  # connections
    "restarted",
]


@dataclass(frozen=True, slots=True)
class Event:
    """One line.

    Attributes:
        at: when, in nanoseconds.
        pid: of the process that it is about.
        group: of which process group that is: whole groups are killed and stopped.
        who: the attempt to get a lock, a name of its own for each.
        limit: how many may hold `key` at once.
        tenant: the fair group for which it is held, of which one may hold `key` at once.
        starts: how many may begin to hold `key` in any `window`; 0 if any number may.
        window: in nanoseconds.
        fence: of the grant.
        held: whether the client took its lock to be held just then.
        until: when its lease ends, as far as the client knows; in `gave_up`, until when the client
            let the server wait for certain.
        task: id of the task.
        detail: for people.
    """

    what: What
    at: int
    pid: int = 0
    group: int = 0
    who: str = ""
    key: str = ""
    limit: int = 1
    tenant: str = ""
    starts: int = 0
    window: int = 0
    fence: int | None = None
    held: bool | None = None
    until: int | None = None
    task: str = ""
    detail: str = ""


_DEFAULTS = {field.name: field.default for field in fields(Event)}


class Recorder:
    """Writes events about the calling process.

    Each is one write to a file opened with O_APPEND: lines of several processes never mix, and a
    line is there when the call returns, whatever happens to the process next.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, what: What, **more: Any) -> None:
        """Write an event, now and about this process unless `more` says otherwise."""
        given = {"at": now(), "pid": os.getpid(), "group": os.getpgrp(), **more}
        event = asdict(Event(what, **given))
        line = {name: value for name, value in event.items() if value != _DEFAULTS[name]}
        os.write(self._file, (json.dumps(line, separators=(",", ":")) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def read(path: str | Path) -> list[Event]:
    """All events, in the order of their times.

    Raises:
        ValueError: a line is damaged: what follows from such a history could be anything.
    """
    return sorted(_parsed(path), key=lambda event: event.at)


def _parsed(path: str | Path) -> Iterator[Event]:
    with Path(path).open() as file:
        for number, line in enumerate(file, 1):
            try:
                yield Event(**json.loads(line))
            except (ValueError, TypeError) as exc:
                raise ValueError(f"{path}, line {number}: {exc}: {line[:200]!r}") from None


def now() -> int:
    """The time on the clock that all processes share, in nanoseconds."""
    return time.monotonic_ns() - _shift()


def shared(monotonic: float) -> int:
    """Turn a `time.monotonic()` of this process into a time of the shared clock."""
    return round(monotonic * 1e9) - _shift()


_known_shift: int | None = None


def _shift() -> int:
    """What this process's time namespace adds to the clock, in nanoseconds."""
    global _known_shift
    if _known_shift is None:
        _known_shift = _read_shift()
    return _known_shift


def _read_shift() -> int:
    try:
        lines = Path("/proc/self/timens_offsets").read_text().splitlines()
    except FileNotFoundError:
        return 0
    for line in lines:
        name, seconds, nanoseconds = line.split()
        if name in ("monotonic", "1"):
            return int(seconds) * 1_000_000_000 + int(nanoseconds)
    return 0
