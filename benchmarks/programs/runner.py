"""Run the tasks of `benchmarks.jobs` as a process of a worker's pool does, without a broker.

It prints a line once it is ready. For each line on its input, the name of a task and a number, it
runs it that often, each time with another key, and prints a line.
"""

from __future__ import annotations

import gc
import itertools
import sys
import uuid
from typing import Any

from celery.app import trace
from celery.concurrency.prefork import process_initializer

from benchmarks import jobs

HOSTNAME = "bench@here"


def handed_over(name: str, key: str) -> tuple[str, str, dict[str, Any], Any]:
    """Return what the main process of a worker gives its pool of a message."""
    task_id = str(uuid.uuid4())
    message = jobs.app.amqp.as_task_v2(task_id, name, (key,), {}, ignore_result=True)
    delivery = {"exchange": "", "routing_key": "celery", "priority": 0, "redelivered": False}
    request = {
        **message.headers,
        **message.properties,
        "hostname": HOSTNAME,
        "delivery_info": delivery,
        "args": (key,),
        "kwargs": {},
    }
    return name, task_id, request, message.body


def main() -> None:
    jobs.app.WorkController(hostname=HOSTNAME, concurrency=1)
    trace.setup_worker_optimizations(jobs.app, HOSTNAME)
    process_initializer(jobs.app, HOSTNAME)
    keys = map(str, itertools.count())
    # A full collection looks at all of Celery, and when one is due is chance.
    gc.freeze()
    print(flush=True)
    for line in sys.stdin:
        name, number = line.split()
        for _ in range(int(number)):
            failed, result, _ = trace.fast_trace_task(*handed_over(name, next(keys)), None, None)
            if failed:
                sys.exit(f"{name} failed: {result}")
        print(flush=True)


if __name__ == "__main__":
    main()
