"""The Flask application of the manual, as its page has it: a worker, two views."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from celery import Celery

from celery_dflock import dflock
from examples.demo.stage import ROOT, LockServer, Redis
from tests.quick_start import Typed, completed

PAGE = ROOT / "docs" / "howto" / "flask.md"
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
WORKER = re.compile(r"^celery -A .*$", re.MULTILINE)

VIEWS = """
from celery.result import AsyncResult
from celery.signals import after_task_publish
from shop import flask_app

sent = []
after_task_publish.connect(lambda headers, **_: sent.append(headers["id"]), weak=False)
client = flask_app.test_client()
status = client.post("/sync/7").status_code
print(status, AsyncResult(sent.pop()).get(timeout=30))
print(client.post("/refund/7").status_code)
print(client.post("/refund/8").status_code)
"""


@pytest.mark.usefixtures("needs_redis")
def test_the_application_of_the_page(tmp_path: Path) -> None:
    page = PAGE.read_text()
    [text], [worker] = CODE.findall(page), WORKER.findall(page)
    programs = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    with Redis(tmp_path) as redis, LockServer(tmp_path) as locks:
        here = text.replace("redis://127.0.0.1:6379/0", redis.url)
        (tmp_path / "shop.py").write_text(here.replace("127.0.0.1:6388", locks.address))
        outside = Celery("outside", set_as_current=False)
        outside.conf.dflock_servers = [locks.address]
        with (
            Typed(tmp_path, "worker", f"{worker} --concurrency 1", env),
            dflock("account:8", app=outside),  # another program has this account
        ):
            done = completed((sys.executable, "-W", "error", "-c", VIEWS), tmp_path, env)

    assert done.stdout.splitlines() == ["202 account 7 is synced", "200", "409"], done.stderr
