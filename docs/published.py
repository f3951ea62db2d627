"""Whose repository this is: nothing in it says so, and what is published has to.

The one setting is the variable ``GITHUB_REPOSITORY``, such as ``somebody/celery-dflock``, which every
workflow on GitHub has. A release (`.ci/release.py`) and the site (`conf.py`) turn the links of the
repository, which are relative, into links that work elsewhere. ``python docs/published.py`` writes
them into the files of this checkout: do that where it is thrown away afterwards.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTING = "GITHUB_REPOSITORY"
ACCOUNT = "<account>"
"""What pages say for the account that has the repository, in commands that a reader types."""

README = Path("README.md")
PROJECTS = (Path("pyproject.toml"), Path("server/pyproject.toml"))


def repository(environment: Mapping[str, str] = os.environ) -> str | None:
    """The account and the name, or None where the setting is missing or empty.

    Raises:
        SystemExit: it is no account and name.
    """
    name = environment.get(SETTING)
    if name and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise SystemExit(f"{SETTING} is {name!r}: write the account and the name, as in a/b")
    return name or None


def urls(of: str) -> dict[str, str]:
    """What a package index links to."""
    account, _, name = of.partition("/")
    source = f"https://github.com/{of}"
    return {
        "Documentation": f"https://{account}.github.io/{name}/",
        "Source": source,
        "Issues": f"{source}/issues",
        "Changelog": f"{source}/blob/main/CHANGELOG.md",
    }


def absolute(text: str, of: str) -> str:
    """A page at the top of the repository, with links that work on a package index."""
    images = f"https://raw.githubusercontent.com/{of}/main/"
    files = f"https://github.com/{of}/blob/main/"
    text = re.sub(r'((?:src|srcset)="|\]\()(?=docs/images/)', rf"\g<1>{images}", text)
    return re.sub(r"\]\((?!https?:|#|<)", rf"]({files}", text)


def with_account(text: str, of: str) -> str:
    """A page with the account in its commands; images and names of hosts are in lower case."""
    account = of.partition("/")[0]
    text = text.replace(f"ghcr.io/{ACCOUNT}", f"ghcr.io/{account.lower()}")
    return text.replace(ACCOUNT, account)


def unfit(shown: str) -> list[str]:
    """What must not be in a page that an index shows: links that lead nowhere, and placeholders."""
    targets = re.findall(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"', shown)
    links = [link for pair in targets for link in pair if link]
    lost = [link for link in links if not link.startswith(("https://", "http://", "#"))]
    return lost + re.findall(rf"{ACCOUNT}|\bOWNER\b", shown)


def write(root: Path, of: str) -> None:
    """Write links to this repository into what a package index shows of these sources.

    Raises:
        SystemExit: they are there already.
    """
    for project in PROJECTS:
        text = (root / project).read_text()
        if "\n[project.urls]\n" in text:
            raise SystemExit(f"{project} has links already: start from a fresh checkout")
        lines = [f'{name} = "{url}"' for name, url in urls(of).items()]
        (root / project).write_text("\n".join([text, "[project.urls]", *lines, ""]))
    readme = root / README
    readme.write_text(with_account(absolute(readme.read_text(), of), of))


def main() -> None:
    of = repository()
    if of is None:
        raise SystemExit(f"{SETTING} is not set: it says whose repository the links lead to")
    write(ROOT, of)


if __name__ == "__main__":
    sys.exit(main())
