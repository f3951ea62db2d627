"""Every Python snippet of the README and the docs runs, and what is made from code is up to date."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo import stage

BOUND = 60
PAGES = [stage.ROOT / "README.md", *sorted((stage.ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def snippets():
    for page in PAGES:
        for number, text in enumerate(SNIPPET.findall(page.read_text()), 1):
            yield pytest.param(text, id=f"{page.name}-{number}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("docs")


@pytest.fixture(scope="module")
def lock_server(directory):
    with stage.LockServer(directory) as server:
        yield server


def run(script: Path, server: stage.LockServer):
    return subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, "DFLOCK_SERVERS": server.address},
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )


@pytest.mark.parametrize("text", list(snippets()))
def test_snippet_runs(text, tmp_path, lock_server):
    # Only where the server is has to be told: the page assumes the default port.
    text = text.replace("127.0.0.1:6388", lock_server.address)
    where = f"servers=[({lock_server.host!r}, {lock_server.port})]"
    text = text.replace("acquire_timeout_s=10)", f"acquire_timeout_s=10, {where})")
    script = tmp_path / "snippet.py"
    script.write_text(text)

    done = run(script, lock_server)

    assert done.returncode == 0, done.stderr


def test_the_first_example_does_what_it_says(tmp_path, lock_server):
    try:
        stage.redis_executable()
    except stage.StageError as exc:
        pytest.skip(str(exc))
    text = SNIPPET.search((stage.ROOT / "README.md").read_text())[1]
    text = text.replace("127.0.0.1:6388", lock_server.address)
    (tmp_path / "readme_tasks.py").write_text(text)
    with stage.Redis(tmp_path) as redis:
        env = {
            "PYTHONPATH": str(tmp_path),
            "CELERY_BROKER_URL": redis.url,
            "CELERY_RESULT_BACKEND": redis.url,
        }
        with stage.Worker(tmp_path, app="readme_tasks", env=env) as worker:
            worker.wait_ready()
            call = tmp_path / "call.py"
            call.write_text(
                "from readme_tasks import sync_account\n"
                "print(sync_account.delay(7).get(timeout=30))\n"
            )
            done = subprocess.run(
                [sys.executable, str(call)],
                env={**os.environ, **env},
                capture_output=True,
                text=True,
                timeout=BOUND,
                check=False,
            )

    assert done.stdout == "account 7 is synced\n", done.stderr


def test_generated_pages_are_up_to_date():
    check = [sys.executable, str(stage.ROOT / "docs" / "generate.py"), "--check"]
    assert subprocess.run(check, timeout=BOUND, check=False).returncode == 0, (
        "run: python docs/generate.py"
    )
