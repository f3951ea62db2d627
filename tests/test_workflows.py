"""The workflows name only what there is: targets, files, versions."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from dflockd import __version__
from examples.demo.stage import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGET = re.compile(r"^([a-z.][a-z-]*):", re.MULTILINE)
TEST_FILE = re.compile(r"\{project\}/(\S+?)[\s\"']", re.MULTILINE)


def workflow(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())


def steps(name: str) -> Iterator[dict[str, Any]]:
    for job in workflow(name)["jobs"].values():
        yield from job["steps"]


def commands() -> Iterator[list[str]]:
    for path in WORKFLOWS:
        for step in steps(path.name):
            for line in step.get("run", "").splitlines():
                yield shlex.split(line)


def test_each_target_is_in_the_makefile() -> None:
    targets = {*TARGET.findall((ROOT / "Makefile").read_text()), ".venv/.stamp"}
    called = [words[1] for words in commands() if words[0] == "make"]

    assert {"lint", "types", "test", "docs", "release-check", "smoke"} <= set(called)
    assert [each for each in called if each not in targets] == []


def test_each_file_of_a_command_is_there() -> None:
    names = [
        word.removeprefix("ARGS=")
        for words in commands()
        for word in words
        if re.fullmatch(r"(ARGS=)?(\.ci|tests|server|docs)/[\w./-]+", word)
    ]

    assert ".ci/release.py" in names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_each_file_that_tests_a_compiled_wheel_is_there() -> None:
    project = tomllib.loads((ROOT / "server" / "pyproject.toml").read_text())
    wheels = project["tool"]["cibuildwheel"]
    lines = [*wheels["test-command"], *(each["test-command"][0] for each in wheels["overrides"])]
    names = [name for line in lines for name in TEST_FILE.findall(f"{line} ")]

    assert len(names) > 5
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_nothing_is_allowed_that_no_job_asks_for(path: Any) -> None:
    """The token of a job reads the repository, and no more where the job does not say so."""
    assert workflow(path.name)["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_job_ends(path: Any) -> None:
    without = [
        name for name, job in workflow(path.name)["jobs"].items() if "timeout-minutes" not in job
    ]

    assert without == []


def test_each_action_of_others_is_pinned() -> None:
    """A tag can be moved to other code. The publisher's own is a branch that it keeps safe itself."""
    used = [step["uses"] for path in WORKFLOWS for step in steps(path.name) if step.get("uses")]
    loose = {each for each in used if not re.search(r"@[0-9a-f]{40}$", each)}

    assert len(used) > 15
    assert loose == {"pypa/gh-action-pypi-publish@release/v1"}


def test_the_manual_names_the_image_that_a_release_publishes() -> None:
    [names] = [step for step in steps("release.yml") if step.get("id") == "names"]
    account = "${{ github.repository_owner }}"
    image = names["with"]["images"].replace(account, "<account>")

    assert f"docker pull {image}:{__version__}\n" in (ROOT / "docs/containers.md").read_text()
