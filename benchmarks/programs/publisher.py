"""Send the tasks of `benchmarks.jobs`, as often as it is told.

It prints a line once it is ready. For each line on its input, the name of a task, a number and the
arguments, it sends it that often with its result ignored, and prints their ids. Without arguments
each gets another key.
"""

from __future__ import annotations

import gc
import itertools
import sys

from benchmarks import jobs


def main() -> None:
    keys = map(str, itertools.count())
    # A full collection looks at all of Celery, and when one is due is chance.
    gc.freeze()
    print(flush=True)
    for line in sys.stdin:
        name, number, *args = line.split()
        task = jobs.app.tasks[name]
        sent = [
            task.apply_async(args or (next(keys),), ignore_result=True) for _ in range(int(number))
        ]
        print(*(result.id for result in sent), flush=True)


if __name__ == "__main__":
    main()
