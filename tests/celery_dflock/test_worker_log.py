"""What fails a test by a worker's log, and what does not."""

from __future__ import annotations

import pytest

from tests.celery_dflock.worker_log import faults_of

TRACEBACK = "Traceback (most recent call last):\n  File ...\nAttributeError: it is None\n"


def record(text: str) -> str:
    return f"[2026-11-25 01:31:33,320: ERROR/MainProcess] {text}\n"


@pytest.mark.parametrize(
    "text",
    [
        "Error on restarting Step: AttributeError('it is None')",
        f"<Request: parked[1]> could not be given up\n{TRACEBACK}",
        f"Unrecoverable error: AttributeError('it is None')\n{TRACEBACK}",
        f"Couldn't ack 1, reason:AttributeError('it is None')\n{TRACEBACK}",
    ],
)
def test_a_fault_is_found_among_the_others(text: str) -> None:
    known = record(f"consumer: Connection to broker lost.\n{TRACEBACK}")
    assert faults_of(known + record(text) + known) == [record(text)]


@pytest.mark.parametrize(
    "text",
    [
        f"consumer: Connection to broker lost.\n{TRACEBACK}",
        f"Task plain[1] raised unexpected: ValueError('as asked')\n{TRACEBACK}",
        f"Task patient[1] reject requeue=False: as asked\n{TRACEBACK}",
        f"Couldn't ack 1, reason:RecoverableConnectionError(None)\n{TRACEBACK}",
        f"Error cleaning up after event loop: BrokenPipeError(32, 'Broken pipe')\n{TRACEBACK}",
        "Task plain[1] received",
    ],
)
def test_what_celery_says_of_tasks_and_lost_connections_is_no_fault(text: str) -> None:
    assert not faults_of(record(text) * 2)
