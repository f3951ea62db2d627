"""One at a time for each account, first come, first served.

dflockd --host 127.0.0.1
celery -A examples.locked_task worker --concurrency 4
python -m examples.locked_task
"""

import time

from celery import Celery, group

from celery_dflock import LockedTask, require_lock

app = Celery("examples.locked_task", config_source="examples.celeryconfig")


# The name is given because run as a script this module is called __main__.
@app.task(
    name="examples.locked_task.sync_account", base=LockedTask, lock_key="account:{account_id}"
)
def sync_account(account_id: int) -> dict[str, float | int | None]:
    lock = require_lock()
    began = time.monotonic()
    time.sleep(0.2)  # the work: nobody else works on this account meanwhile
    return {"account": account_id, "began": began, "ended": time.monotonic(), "fence": lock.fence}


if __name__ == "__main__":
    results = group(sync_account.s(account) for account in (1, 2, 1, 2, 1)).delay().get(timeout=60)
    for run in sorted(results, key=lambda run: run["fence"]):
        print("account {account}: {began:.2f} to {ended:.2f} s, fence {fence}".format(**run))
