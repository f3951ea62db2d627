"""What is published says the same of itself everywhere."""

from __future__ import annotations

import re
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


def tag(name):
    return subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "release.py"), "--tag", name],
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )


def test_both_have_one_version():
    assert celery_dflock.__version__ == dflockd.__version__


def test_a_tag_of_another_version_is_refused():
    version = celery_dflock.__version__

    assert tag(f"v{version}").returncode == 0
    refused = tag("v99.0.0")
    assert refused.returncode == 1
    assert (
        refused.stderr == f"the tag is v99.0.0 and the version is {version}: correct one of them\n"
    )


def test_the_changelog_begins_with_what_is_unreleased():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert headings[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", each) for each in headings[1:])
    assert headings[1:]


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
