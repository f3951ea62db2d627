"""What is sent by way of SQS, in an environment that has its client: ``python -m`` this."""

from __future__ import annotations

from tests.celery_dflock import jobs
from tests.celery_dflock.oldest_celery import oldest
from tests.celery_dflock.oldest_celery.oldest import PATIENCE, events, held, wait_events

LONG_PAUSE = {"lock_requeue": {"base": 60.0, "cap": 60.0}}


def impatient() -> None:
    """The pause of a requeue and a wait are longer than the broker waits, and each is one message."""
    key = "impatient"
    with held(key):
        sent = {
            task: task.apply_async((), {"key": key}, headers={"dflock": header})
            for task, header in {
                jobs.requeued: LONG_PAUSE,
                jobs.late_patient: {**LONG_PAUSE, "lock_timeout": 0},
                jobs.parked: {},
            }.items()
        }
        for task in (jobs.requeued, jobs.late_patient):
            wait_events(3, what="requeued", id=sent[task].id)
        assert not events(what="start", key=key)
    for each in sent.values():
        assert each.get(timeout=PATIENCE) == each.id
        attempts = [event["attempt"] for event in events(what="requeued", id=each.id)]
        assert len(set(attempts)) == len(attempts), "there were several of it"
        assert len(events(what="start", id=each.id)) == 1


if __name__ == "__main__":
    oldest.SCENARIOS["impatient"] = impatient
    oldest.main()
