"""Every Python snippet of the README and the docs runs, and what is made from code is up to date."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from examples.demo import stage
from tests import forkserver, quick_start

BOUND = 60
PAGES = [stage.ROOT / "README.md", *sorted((stage.ROOT / "docs").glob("**/*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def snippets():
    for page in PAGES:
        for number, text in enumerate(SNIPPET.findall(page.read_text()), 1):
            name = page.relative_to(stage.ROOT).with_suffix("").as_posix()
            # What needs a broker has a test of its own, and so have the projects of web frameworks.
            if "__main__" not in text and name not in ("docs/howto/django", "docs/howto/flask"):
                yield pytest.param(text, id=f"{name}-{number}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("docs")


@pytest.fixture(scope="module")
def lock_server(directory):
    with stage.LockServer(directory) as server:
        yield server


def run(script: Path, server: stage.LockServer):
    """Return the status with which it ends, and what it says then."""
    said = script.with_name("said")
    with said.open("wb") as file:
        process = forkserver.start(
            [sys.executable, "-m", "tests.snippet", str(script)],
            cwd=stage.ROOT,
            env={**os.environ, "DFLOCK_SERVERS": server.address},
            stdout=subprocess.DEVNULL,
            stderr=file,
        )
    try:
        return process.wait(BOUND), said.read_text()
    finally:
        process.kill()


@pytest.mark.parametrize("text", list(snippets()))
def test_snippet_runs(text, tmp_path, lock_server):
    # Only where the server is has to be told: the page assumes the default port.
    text = text.replace("127.0.0.1:6388", lock_server.address)
    where = f"servers=[({lock_server.host!r}, {lock_server.port})]"
    text = text.replace("acquire_timeout_s=10)", f"acquire_timeout_s=10, {where})")
    script = tmp_path / "snippet.py"
    script.write_text(text)

    status, said = run(script, lock_server)

    assert status == 0, said


def test_a_warning_in_a_snippet_is_an_error(tmp_path, lock_server):
    script = tmp_path / "snippet.py"
    script.write_text("import warnings\nwarnings.warn('it is old', DeprecationWarning)\n")

    status, said = run(script, lock_server)

    assert status == 1
    assert "DeprecationWarning: it is old" in said


@pytest.mark.usefixtures("needs_redis")
def test_the_quick_start_does_what_it_says(tmp_path):
    with stage.Redis(tmp_path) as redis:
        output = quick_start.run(tmp_path, Path(sys.executable).parent, redis.url, redis.url)

    printed = quick_start.QuickStart((stage.ROOT / "README.md").read_text()).output
    assert quick_start.without_times(output) == quick_start.without_times(printed)


def test_the_quick_start_installs_what_there_is():
    line = quick_start.QuickStart((stage.ROOT / "README.md").read_text()).install
    wanted = Requirement(shlex.split(line)[2])
    project = tomllib.loads((stage.ROOT / "pyproject.toml").read_text())["project"]

    assert wanted.name == project["name"]
    assert wanted.extras <= project["optional-dependencies"].keys()


def test_generated_pages_are_up_to_date():
    check = [sys.executable, str(stage.ROOT / "docs" / "generate.py"), "--check"]
    assert subprocess.run(check, timeout=BOUND, check=False).returncode == 0, (
        "run: python docs/generate.py"
    )
