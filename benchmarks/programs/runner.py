"""Run the tasks of `benchmarks.loads.jobs` as a process of a worker's pool does, without a broker.

It prints a line once it is ready. For each line on its input, the name of a task and a number, it
runs it that often, each time with another key, and prints a line. With a third word it counts the
calls of a run meanwhile, and prints them as JSON.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import uuid
from typing import Any

from celery.app import trace
from celery.concurrency.prefork import process_initializer

from benchmarks.calls import calls
from benchmarks.loads import jobs

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
        name, number, *counting = line.split()

        def run(number: int, name: str = name) -> None:
            for _ in range(number):
                failed, result, _ = trace.fast_trace_task(
                    *handed_over(name, next(keys)), None, None
                )
                if failed:
                    sys.exit(f"{name} failed: {result}")

        if counting:
            print(json.dumps(calls(run, int(number))), flush=True)
        else:
            run(int(number))
            print(flush=True)


if __name__ == "__main__":
    main()
