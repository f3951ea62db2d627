"""What a worker of a test must not have logged, whatever the test is about."""

from __future__ import annotations

import re

from examples.demo.stage import Worker

_begin = re.compile(r"^(?=\[\d{4}-\d\d-\d\d [\d:,]+: [A-Z]+/)", re.MULTILINE)
"""Before a record of Celery's log, which can have many lines."""

NOT_GIVEN_UP = "Error on restarting"
"""A part of the consumer could not give up what it had of a lost connection to the broker.

Celery says only this then, and the rest of that part has the messages and positions of before.
"""

KNOWN = re.compile(
    r"Task \S+ (raised|reject)|Chord \S+ raised|Task handler raised error"
    r"|consumer: Connection to broker lost"
    r"|(Couldn't ack \d+, reason|Error cleaning up after event loop): ?"
    r"(\w*ConnectionError|BrokenPipeError)"
)
"""Whose tracebacks are no fault of the worker.

They are of tasks; of a connection that is lost; and of what still wants to use it: the event loop of
before, and a task that was running meanwhile and is to be acknowledged.
"""


class CheckedWorker(Worker):
    """A worker that fails its test if its log says that something is wrong with the worker itself.

    Attributes:
        may_fail: whether this is about something that Celery itself does not survive.
    """

    may_fail = False

    def __exit__(self, exc_type: object = None, *rest: object) -> None:
        """End it; look at what it has said, unless the test has failed already."""
        super().__exit__(exc_type, *rest)
        if exc_type is None and not self.may_fail and self.log.exists():
            faults = faults_of(self.log_text())
            assert not faults, f"worker {self.name}:\n" + "\n".join(faults)


def faults_of(log: str) -> list[str]:
    """Return the records that tell of a fault of the worker."""
    return [
        record
        for record in _begin.split(log)
        if NOT_GIVEN_UP in record
        or ("Traceback (most recent call last)" in record and not KNOWN.search(record))
    ]
