"""What type checkers say of code that uses the plugin, such as that of the README and the manual."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from celery_dflock import LockedTask, RequeueOptions, TaskOptions, options
from celery_dflock.options import OPTIONS, Backoff
from examples.demo.stage import ROOT

pytestmark = pytest.mark.timeout(400)

BOUND = 300
"""Seconds for a type checker: it is the one that computes most, and has a tenth of a busy machine."""

SNIPPET = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [
    ROOT / "README.md",
    *sorted(
        path
        for path in (ROOT / "docs").glob("**/*.md")
        if path.name not in ("django.md", "flask.md")  # one has no types, one may not be there
    ),
]

WRONG = """
from celery import Celery
from celery_dflock import LockedTask, TaskOptions, current_lock, dflock, require_lock

app = Celery("wrong")

TaskOptions(lock_conflict="skipp")
TaskOptions(lock_confict="skip")
TaskOptions(lock_ttl="30")
TaskOptions(lock_unique="until_done")
TaskOptions(lock_requeue={"max_attemps": 3})


class Report(LockedTask):
    lock_lost = "warning"


current_lock().fence
require_lock().fenze

with dflock("key") as lock:
    lock.extend("30")
"""
"""Each statement with a mistake that somebody could make."""


def mypy(directory: Path) -> list[str]:
    (directory / "mypy.ini").write_text(
        "[mypy]\nstrict = true\n[mypy-celery.*]\nignore_missing_imports = true\n"
    )
    return run(
        directory,
        *("mypy", "--no-error-summary", "--no-pretty"),
        # Celery has no types: its decorators and its Task are Any.
        *("--allow-untyped-decorators", "--allow-subclassing-any", "--allow-untyped-calls"),
        *("--cache-dir", str(ROOT / ".mypy_cache" / "snippets"), "."),
    )


def pyright(directory: Path) -> list[str]:
    """As editors have it."""
    options = {
        "typeCheckingMode": "standard",
        "extraPaths": [str(ROOT), str(ROOT / "server")],
        "reportMissingImports": False,
        "reportMissingModuleSource": False,
        "reportFunctionMemberAccess": False,  # Celery has no types: a task would be a plain function
    }
    (directory / "pyrightconfig.json").write_text(json.dumps(options))
    lines = run(directory, "basedpyright", "--pythonpath", sys.executable, ".")
    return [line.strip().removeprefix(f"{directory}/") for line in lines]


def run(directory: Path, checker: str, *arguments: str) -> list[str]:
    """The errors that a type checker finds there, each after its file and line."""
    done = subprocess.run(
        [sys.executable, "-m", checker, *arguments],
        cwd=directory,
        env={"PATH": "", "MYPYPATH": f"{ROOT}:{ROOT / 'server'}"},
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if " error: " in line]


@pytest.fixture(scope="module", params=[mypy, pyright], ids=["mypy", "pyright"])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What is wrong, for the snippets and for code with mistakes; of one run."""
    directory = tmp_path_factory.mktemp("typing")
    for page in PAGES:
        for number, text in enumerate(SNIPPET.findall(page.read_text()), 1):
            name = f"{page.stem.replace('-', '_')}_{number}.py"
            (directory / name).write_text(text)
    (directory / "wrong.py").write_text(WRONG.lstrip("\n"))
    errors = request.param(directory)
    wrong = [line for line in errors if line.startswith("wrong.py:")]
    return {"wrong": wrong, "snippets": [line for line in errors if line not in wrong]}


def test_snippets_are_typed(found: dict[str, list[str]]) -> None:
    assert found["snippets"] == []


def test_mistakes_are_found(found: dict[str, list[str]]) -> None:
    lines = [int(line.split(":")[1]) for line in found["wrong"]]
    text = WRONG.lstrip("\n").splitlines()

    assert [text[number - 1].strip() for number in lines] == [
        'TaskOptions(lock_conflict="skipp")',
        'TaskOptions(lock_confict="skip")',
        'TaskOptions(lock_ttl="30")',
        'TaskOptions(lock_unique="until_done")',
        'TaskOptions(lock_requeue={"max_attemps": 3})',
        'lock_lost = "warning"',
        "current_lock().fence",
        "require_lock().fenze",
        'lock.extend("30")',
    ]


def test_the_options_are_those_of_the_task() -> None:
    declared = {name for name in LockedTask.__annotations__ if name.startswith("lock_")}

    assert declared == set(OPTIONS) == set(TaskOptions.__annotations__)
    assert set(RequeueOptions.__annotations__) == set(Backoff.__dataclass_fields__)


def described(name: str) -> dict[str, str]:
    """The fields of a class of the options that have a text below them, which editors show."""
    [body] = [
        node.body
        for node in ast.parse(inspect.getsource(options)).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return {
        field.target.id: text.value.value
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def test_an_editor_has_a_description_of_each_option() -> None:
    assert set(described("TaskOptions")) == set(OPTIONS)
    assert set(described("RequeueOptions")) == set(RequeueOptions.__annotations__)


def test_the_description_names_the_default() -> None:
    for option, text in described("TaskOptions").items():
        value = inspect.getattr_static(LockedTask, option)
        if isinstance(value, int | str):
            shown = f'``"{value}"``' if isinstance(value, str) else str(int(value))
            assert f"The default is {shown}" in text, option


@pytest.mark.parametrize("name", ["TaskOptions", "RequeueOptions"])
def test_the_site_shows_a_description_whole(name: str) -> None:
    """Of a first line with a colon Sphinx (its Napoleon) takes what is before it for a type."""
    for option, text in described(name).items():
        assert ":" not in text.splitlines()[0], option
