"""What the cells of the table must say."""

from __future__ import annotations

import re

from tests.celery_dflock.outcome.table.side import SETTLING, Finding, Side
from tests.celery_dflock.outcome.table.trials import OUTCOMES
from tests.celery_dflock.processes import PATIENCE

EXPECTED: dict[str, dict[str, str]] = {
    "success": {"": "SUCCESS"},
    "exception": {"": r"FAILURE \(ValueError\)"},
    "retry": {"": "SUCCESS"},
    "autoretry": {"": "SUCCESS"},
    "ignore": {"": "PENDING", "eager": "IGNORED"},
    # FAILURE since Celery 5.7, PENDING before.
    "reject": {"": r"FAILURE \(Reject\)|PENDING", "eager": "REJECTED"},
    "soft": {"": "not applied, SUCCESS", "prefork": r"FAILURE \(SoftTimeLimitExceeded\)"},
    "hard": {
        "": "not applied, SUCCESS",
        "prefork": r"FAILURE \(TimeLimitExceeded\)",
        "gevent": r"FAILURE \(TimeLimitExceeded\)",
    },
    "revoke-waiting": {"": "not applied, SUCCESS"},
    "terminate-waiting": {
        "": "REVOKED",
        "threads": "not applied, SUCCESS",
        "solo": "not applied, SUCCESS",
    },
    "terminate": {"": "REVOKED", "threads": "not applied, SUCCESS", "solo": "not applied, SUCCESS"},
    "warm": {"": "SUCCESS"},
    "warm-waiting": {"": "requeued, SUCCESS"},
    # How far Celery gets with the announcement that it cancels the task is a matter of luck.
    "cold": {
        "": "RETRY|REVOKED|PENDING",
        "threads": "stays warm, SUCCESS",
        "solo": r"FAILURE \(NotImplementedError\)|PENDING",
    },
    "cold-int": {
        "": "RETRY|REVOKED|PENDING",
        "threads": "stays warm, SUCCESS",
        "solo": r"FAILURE \(NotImplementedError\)|PENDING",
    },
    "remote": {"": "SUCCESS", "solo": "heard late, SUCCESS"},
    "remote-waiting": {"": "requeued, SUCCESS", "solo": "heard late, SUCCESS"},
    "cold-waiting": {
        "": "requeued, SUCCESS",
        "gevent": "requeued, SUCCESS|RETRY|PENDING",
        "eventlet": "requeued, SUCCESS|RETRY|PENDING",
        "solo": r"FAILURE \(NotImplementedError\)|PENDING",
    },
    "soft-ends": {"": "SUCCESS", "solo": r"FAILURE \(NotImplementedError\)|PENDING"},
    "soft-late": {
        "": "RETRY|REVOKED|PENDING",
        # Celery's handler of the signal cannot wait in gevent's hub, where the signal mostly finds it.
        "gevent": "stays warm, SUCCESS|RETRY|REVOKED|PENDING",
        "threads": "stays warm, SUCCESS",
        "solo": r"FAILURE \(NotImplementedError\)|PENDING",
    },
    "soft-waiting": {"": "requeued, SUCCESS", "solo": r"FAILURE \(NotImplementedError\)|PENDING"},
    "cold-second": {"": "stays warm, SUCCESS"},
    "child": {"": "no child", "prefork": r"FAILURE \(WorkerLostError\)"},
    "worker": {"": "PENDING"},
    "exit": {"": "PENDING", "prefork": r"FAILURE \(WorkerLostError\)", "eager": "ends the caller"},
    "lost-waiting": {"": r"FAILURE \(LockLostError\)"},
    "lost-computing": {
        "": r"FAILURE \(LockLostError\)",
        "gevent": "not interrupted, SUCCESS",
        "eventlet": "not interrupted, SUCCESS",
    },
    "superseded-waiting": {"": "REVOKED", "eager": "IGNORED"},
    "superseded-computing": {
        "": "REVOKED",
        "gevent": "not interrupted, SUCCESS",
        "eventlet": "not interrupted, SUCCESS",
        "eager": "IGNORED",
    },
}
"""What becomes of the task, as a pattern; "" is for the pools that are not named."""

WITHOUT_WORKER = {"success", "exception", "retry", "autoretry", "ignore", "reject", "exit"}
WITHOUT_WORKER |= {"lost-waiting", "lost-computing", "superseded-waiting", "superseded-computing"}


def expected(outcome: str, pool: str) -> str:
    """What has to become of the task, as a pattern."""
    if pool == "eager" and outcome not in WITHOUT_WORKER:
        return "—"
    return EXPECTED[outcome].get(pool, EXPECTED[outcome][""])


def find(outcome: str, side: Side) -> Finding:
    """Make it happen; wait for long for the state of the task only where one is to come."""
    side.settling = SETTLING if "PENDING" in expected(outcome, side.pool) else PATIENCE
    return OUTCOMES[outcome].trial(side)


def check(outcome: str, pool: str, finding: Finding) -> None:
    """Raise `AssertionError` if this is not what has to become of the task.

    Its lock was free soon, else there is no finding: see `trials`.
    """
    wanted = expected(outcome, pool)
    assert re.fullmatch(wanted, finding.fate), f"{finding.fate}, not {wanted}"
