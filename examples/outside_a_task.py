"""The lock of a task in code that is no task: a view, a shell, a script.

dflockd --host 127.0.0.1
python -m examples.outside_a_task
"""

from celery import Celery

from celery_dflock import LockNotAcquiredError, dflock

app = Celery("examples.outside_a_task", config_source="examples.celeryconfig")
app.set_default()

if __name__ == "__main__":
    with dflock("account:7", timeout=10) as lock:
        # No task with this lock_key runs now, on any worker.
        print(f"holding {lock.key}, fence {lock.fence}")
        try:
            with dflock("account:7", timeout=0):
                print("never printed")
        except LockNotAcquiredError as error:
            print(error)
