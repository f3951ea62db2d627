"""What happens to the lock and to the task, however it ends, in every pool and with every broker.

    python -m tests.celery_dflock.outcome.table                      # all of it, into docs/outcomes.md
    python -m tests.celery_dflock.outcome.table --show warm gevent   # some cells, to the terminal

Every cell is a run of a real worker (eager: of this process): a task holds its lock, somebody else
waits for it already, then it happens, and the time from there to the grant is taken.
"""
