"""The Django project of the manual, as its page has it: each file, a worker, two views."""

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

PAGE = ROOT / "docs" / "howto" / "django.md"
FILE = re.compile(r"^`([\w/.]+\.py)`.*?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

VIEWS = """
from celery.result import AsyncResult
from celery.signals import after_task_publish
from django.test import Client

sent = []
after_task_publish.connect(lambda headers, **_: sent.append(headers["id"]), weak=False)
status = Client().get("/sync/7").status_code
print(status, AsyncResult(sent.pop()).get(timeout=30))
print(Client().get("/refund/7").status_code)
print(Client().get("/refund/8").status_code)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("django")


@pytest.mark.usefixtures("needs_redis")
def test_the_project_of_the_page(directory: Path) -> None:
    files = dict(FILE.findall(PAGE.read_text()))
    assert len(files) == 7
    programs = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    with Redis(directory) as redis, LockServer(directory) as locks:
        for name, text in files.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            here = text.replace("redis://127.0.0.1:6379/0", redis.url)
            path.write_text(here.replace("127.0.0.1:6388", locks.address))
        outside = Celery("outside", set_as_current=False)
        outside.conf.dflock_servers = [locks.address]
        with (
            Typed(directory, "worker", "celery -A shop worker --concurrency 1", env),
            # Another program has account 8, with the prefix of the project in front.
            dflock("shop:account:8", app=outside),
        ):
            shell = (sys.executable, "-W", "error", "manage.py", "shell", "-v", "0", "-c", VIEWS)
            done = completed(shell, directory, env)

    assert done.stdout.splitlines() == ["202 account 7 is synced", "200", "409"], done.stderr
