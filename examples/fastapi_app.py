"""FastAPI and Celery with one lock: a task that works on an account, and a view that must not meet it.

dflockd --host 127.0.0.1
celery -A examples.fastapi_app worker
uvicorn examples.fastapi_app:api
"""

from celery import Celery
from fastapi import FastAPI, HTTPException

from celery_dflock import LockedTask, LockNotAcquiredError, LockUnavailableError, dflock

app = Celery("examples.fastapi_app", config_source="examples.celeryconfig")
api = FastAPI()


@app.task(base=LockedTask, lock_key="account:{account_id}")
def sync_account(account_id: int) -> str:
    return f"account {account_id} is synced"


# "def" and not "async def": FastAPI calls it in a thread, so a slow broker stops no other request.
@api.post("/sync/{account_id}", status_code=202)
def sync(account_id: int) -> dict[str, str]:
    return {"task": sync_account.delay(account_id).id}


@api.post("/refund/{account_id}")
async def refund(account_id: int) -> dict[str, str | int]:
    try:
        async with dflock(f"account:{account_id}", timeout=2, app=app) as lock:
            # The event loop serves other requests while this one waits, and no such task runs now.
            await lock.check()  # before a write: raises if the lock was lost meanwhile
            return {"refunded": account_id, "fence": lock.fence or 0}
    except LockNotAcquiredError as error:  # a task works on the account
        raise HTTPException(409, f"try again later: {error}") from error
    except LockUnavailableError as error:  # no lock server answers
        raise HTTPException(503, "no lock server answers") from error
