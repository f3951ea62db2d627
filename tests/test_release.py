"""What is published says the same of itself everywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib

import celery_dflock
import dflockd
from examples.demo.stage import ROOT

BOUND = 60


def projects():
    for path in (ROOT / "pyproject.toml", ROOT / "server" / "pyproject.toml"):
        yield tomllib.loads(path.read_text())["project"]


def tag(name, root=ROOT):
    return subprocess.run(
        [sys.executable, str(root / ".ci" / "release.py"), "--tag", name],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
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


def test_both_link_to_the_same():
    one, other = (project["urls"] for project in projects())

    assert one == other


def test_links_of_the_readme_work_on_a_package_index():
    for page in (ROOT / "README.md", ROOT / "server" / "README.md"):
        targets = re.findall(r'\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"', page.read_text())
        local = [t for pair in targets for t in pair if t and not t.startswith(("https://", "#"))]
        assert local == [], page


def test_links_of_the_readme_to_files_name_such():
    files = re.findall(
        r"https://(?:github\.com/[^/]+/celery-dflock/(?:blob|tree)|"
        r"raw\.githubusercontent\.com/[^/]+/celery-dflock)/main/([\w./-]+)",
        "".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]),
    )

    assert len(files) > 20
    assert [name for name in files if not (ROOT / name).exists()] == []
