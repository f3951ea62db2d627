"""What the workers of the smoke tests run. pytest-celery copies this file into their containers."""

import socket
import time

from celery import shared_task

from celery_dflock import LockedTask, SingletonTask, current_lock

KEY = "section"
LEASE = 30


@shared_task(name="section", base=LockedTask, lock_key=KEY, lock_ttl=LEASE, lock_timeout=60)
def section(seconds):
    """One at a time. The containers of a machine share its monotonic clock."""
    began = time.monotonic()
    time.sleep(seconds)
    return {
        "began": began,
        "ended": time.monotonic(),
        "fence": current_lock().fence,
        "host": socket.gethostname(),
    }


@shared_task(name="tick", base=SingletonTask)
def tick():
    """What beat sends."""
