"""What is published says the same of itself everywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import celery_dflock
import dflockd
from examples.demo.stage import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import published

BOUND = 60
GITHUB_ITSELF = "../../security/"
"""Pages that GitHub has beside the files of a repository."""


def projects(root=ROOT):
    for path in (root / "pyproject.toml", root / "server" / "pyproject.toml"):
        yield tomllib.loads(path.read_text())["project"]


def tag(name, root=ROOT):
    return release("--tag", name, root=root, repository="somebody/celery-dflock")


def release(*arguments, root=ROOT, repository, cwd=None):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "docs")])
    return subprocess.run(
        [sys.executable, str(root / ".ci" / "release.py"), *arguments],
        env={**os.environ, "PYTHONPATH": paths, "GITHUB_REPOSITORY": repository},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )


def test_both_have_one_version():
    assert celery_dflock.__version__ == dflockd.__version__


def test_a_tag_of_another_version_is_refused():
    refused = tag("v99.0.0")

    assert refused.returncode == 1
    version = celery_dflock.__version__
    assert (
        refused.stderr == f"the tag is v99.0.0 and the version is {version}: correct one of them\n"
    )


def test_a_version_needs_a_date_before_its_tag(tmp_path):
    version = celery_dflock.__version__
    for name in (".ci/release.py", "celery_dflock/__init__.py", "server/dflockd/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)

    (tmp_path / "CHANGELOG.md").write_text(f"## {version}, unreleased\n")
    refused = tag(f"v{version}", tmp_path)
    assert refused.returncode == 1
    assert refused.stderr == f"CHANGELOG.md has no section '## {version} - <date>': date it\n"

    (tmp_path / "CHANGELOG.md").write_text(f"## {version} - 2000-01-01\n")
    assert tag(f"v{version}", tmp_path).returncode == 0


def test_the_changelog_begins_with_this_version():
    first, *before = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    dated = r"- \d{4}-\d\d-\d\d"
    assert re.fullmatch(rf"{re.escape(celery_dflock.__version__)}(, unreleased| {dated})", first)
    assert all(re.fullmatch(rf"\d+\.\d+\.\d+ {dated}", each) for each in before)


def test_the_changelog_names_pages_that_are_there():
    pages = re.findall(r"`(docs/[\w/]+\.md)`", (ROOT / "CHANGELOG.md").read_text())

    assert pages
    assert [page for page in pages if not (ROOT / page).exists()] == []


@pytest.mark.parametrize("wanted", [["--tag", "v0.0.0"], ["--out", "dist"]], ids=str)
@pytest.mark.parametrize(
    ("name", "refusal"),
    [("", "GITHUB_REPOSITORY is not set"), ("celery-dflock", "write the account and the name")],
)
def test_what_is_published_says_whose_it_is(
    wanted: list[str], name: str, refusal: str, tmp_path: Path
) -> None:
    refused = release(*wanted, repository=name, cwd=tmp_path)

    assert refused.returncode == 1
    assert refusal in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_release_has_the_links_of_its_repository(tmp_path):
    for name in ("pyproject.toml", "server/pyproject.toml", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "README.md").open("a") as readme:
        readme.write("docker pull ghcr.io/<account>/dflockd\n")

    published.write(tmp_path, "Some-Body/celery-dflock")

    one, other = (project["urls"] for project in projects(tmp_path))
    assert one == other
    assert one["Source"] == "https://github.com/Some-Body/celery-dflock"
    shown = (tmp_path / "README.md").read_text()
    assert published.unfit(shown) == []
    assert "ghcr.io/some-body/dflockd" in shown
    files = re.findall(
        r"https://(?:github\.com/Some-Body/celery-dflock/blob|"
        r"raw\.githubusercontent\.com/Some-Body/celery-dflock)/main/([\w./-]+)",
        shown,
    )
    assert len(files) > 20
    assert [name for name in files if not (ROOT / name).exists()] == []
    with pytest.raises(SystemExit, match="has links already"):
        published.write(tmp_path, "Some-Body/celery-dflock")


@pytest.mark.parametrize(
    "line",
    [
        "[a](docs/index.md)",
        '<img src="docs/a.svg">',
        "https://OWNER.github.io",
        "<account>/dflockd",
    ],
)
def test_what_an_index_cannot_show_is_found(line):
    assert published.unfit(f"Text.\n\n[b](https://example.org) {line}\n") != []


def readable():
    """The files that somebody meets who reads, installs or configures."""
    for pattern in ("*.md", "*.yml", "*.yaml", "*.toml", "*.py", "*.html", "*.svg", "Makefile"):
        for folder in ("docs", "examples", "server", "celery_dflock", ".github", ".ci", "."):
            found = (ROOT / folder).glob(pattern if folder == "." else f"**/{pattern}")
            yield from (path for path in found if "build" not in path.parts)


def test_nothing_that_a_reader_meets_has_a_placeholder_for_the_repository():
    paths = set(readable())
    names = {path.relative_to(ROOT).as_posix() for path in paths} - {"docs/published.py"}

    assert len(names) > 300
    assert [name for name in names if re.search(r"\bOWNER\b", (ROOT / name).read_text())] == []


def test_links_to_files_name_such():
    """Links in the repository are relative: they work in every copy of it."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    lost = []
    for page in pages:
        text = re.sub(
            r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
        )
        targets = re.findall(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"', text)
        for link in (link for pair in targets for link in pair if link):
            if link.startswith(("https://", "http://", "#", GITHUB_ITSELF)):
                continue
            if not (page.parent / link.partition("#")[0]).exists():
                lost.append((page.name, link))

    assert lost == []
