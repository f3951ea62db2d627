"""Several questions at once, for somebody who has no time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence


def at_once(jobs: Sequence[Callable[[], None]], deadline: float) -> list[bool]:
    """Do all of them at once, on threads; say of each whether it was done by the deadline.

    Nobody waits for the threads of the others: a connection that is not made ends in seconds.

    Args:
        jobs: raise nothing.
        deadline: monotonic time.
    """
    threads = [threading.Thread(target=job, name="dflock-asking", daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [not thread.is_alive() for thread in threads]
