"""A scheduled job that never overlaps itself: while one runs, the next is skipped.

dflockd --host 127.0.0.1
celery -A examples.skip worker --concurrency 2
celery -A examples.skip beat
python -m examples.skip
"""

import time

from celery import Celery

from celery_dflock import LockedTask, Skipped

app = Celery("examples.skip", config_source="examples.celeryconfig")
app.conf.beat_schedule = {"report": {"task": "examples.skip.report", "schedule": 10.0}}


# The name is given because run as a script this module is called __main__.
@app.task(
    name="examples.skip.report",
    base=LockedTask,
    lock_key="report",
    lock_timeout=0,
    lock_conflict="skip",
)
def report(seconds: float = 5.0) -> str:
    time.sleep(seconds)
    return "done"


if __name__ == "__main__":
    both = [report.delay(1.0), report.delay(1.0)]
    for result in both:
        outcome = result.get(timeout=60)
        skipped = Skipped.of(outcome)
        print(f"skipped: {skipped.key} was locked" if skipped else outcome)
