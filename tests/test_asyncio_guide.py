"""FastAPI and Celery with one lock, as the page and the example have it."""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task
from celery.exceptions import ImproperlyConfigured
from celery.result import AsyncResult

from celery_dflock import LockedTask, dflock
from examples.demo.stage import ROOT, LockServer, Redis
from tests.conftest import take_shared_tasks
from tests.quick_start import Typed

PAGE = ROOT / "docs" / "howto" / "asyncio.md"
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BOUND = 30


def post(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, method="POST"), timeout=BOUND
        ) as got:
            return got.status, json.load(got)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@contextmanager
def program(directory: Path, line: str, env: dict[str, str], ready: str) -> Iterator[str]:
    """Start a command, and give the line of its log that says that it is ready."""
    with Typed(directory, line.split()[0], line, env) as started:
        log = started.wait_log(ready)
        yield next(each for each in log.splitlines() if ready in each)


@pytest.mark.parametrize("source", ["page", "example"])
@pytest.mark.usefixtures("needs_redis")
def test_views_and_tasks_exclude_each_other(source: str, tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    with Redis(tmp_path) as redis, LockServer(tmp_path) as locks:
        if source == "page":
            module, where = "shop", tmp_path
            text = CODE.findall(PAGE.read_text())[0].replace("redis://127.0.0.1:6379/0", redis.url)
            (tmp_path / "shop.py").write_text(text.replace("127.0.0.1:6388", locks.address))
        else:
            module, where = "examples.fastapi_app", ROOT
            env |= {"BROKER_URL": redis.url, "DFLOCK_SERVERS": locks.address}
        env["PYTHONPATH"] = str(where)
        outside = Celery("outside", broker=redis.url, backend=redis.url, set_as_current=False)
        outside.conf.dflock_servers = [locks.address]
        worker = f"celery -A {module} worker --concurrency 1 --loglevel INFO"
        web = f"uvicorn {module}:api --port 0"
        with (
            program(tmp_path, worker, env, " ready."),
            program(tmp_path, web, env, "running on http") as line,
        ):
            url = re.findall(r"http://[\d.:]+", line)[0]
            status, answer = post(f"{url}/sync/7")
            assert status == 202
            done = AsyncResult(answer["task"], app=outside)
            assert done.get(timeout=BOUND) == "account 7 is synced"

            status, answer = post(f"{url}/refund/7")
            assert (status, answer["refunded"]) == (200, 7)
            with dflock("account:8", app=outside):
                status, answer = post(f"{url}/refund/8")
            assert status == 409
            assert re.match("try again later: lock 'account:8' .* held by", answer["detail"])

            locks.stop()
            status, answer = post(f"{url}/refund/9")
            assert (status, answer["detail"]) == (503, "no lock server answers")


def test_a_coroutine_function_is_refused_as_the_page_says() -> None:
    app = Celery("refusing", set_as_current=False)

    async def body() -> None: ...

    with pytest.raises(ImproperlyConfigured, match="async def, and its lock would be released"):
        app.task(base=LockedTask, lazy=False, shared=False)(body)
    app.task(base=Task, lazy=False, shared=False, name="other")(body)


def test_a_task_has_its_lock_in_the_coroutines_that_it_runs(tmp_path: Path) -> None:
    text = CODE.findall(PAGE.read_text())[1]
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(text, str(PAGE), "exec"), names)
    take_shared_tasks()  # those of the page are of every app, as in any program
    with LockServer(tmp_path) as locks:
        names["app"].conf.update(dflock_servers=[locks.address], task_always_eager=True)
        assert names["sync_account"].delay(7).get() == "account 7 is synced"
