"""What the pages promise, and which tests hold it: read from the pages and from tests/promises.toml.

A passage of promises is a list, a table, or a section without either, below a line that the file
names. Each of its entries is known by its first words: what is in bold, the first cell, the heading.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LISTED = ROOT / "tests" / "promises.toml"

_TEST = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)


class Passage(NamedTuple):
    """Where promises stand."""

    page: str
    line: str
    """What the line above them begins with."""

    def entries(self) -> list[str]:
        """What is promised there, by the first words of each promise."""
        text = (ROOT / self.page).read_text()
        found = re.search(rf"^{re.escape(self.line)}.*\n", text, re.MULTILINE)
        if found is None:
            raise LookupError(f"{self.page} has no line that begins with {self.line!r}")
        below = re.split(r"^#", text[found.end() :], maxsplit=1, flags=re.MULTILINE)[0]
        block = re.search(r"^(?:- |\|).*\n(?:(?:- |\||  ).*\n)*", below, re.MULTILINE)
        if block is None:
            return [_plain(self.line.lstrip("# "))]
        return list(_bullets(block[0]) if block[0].startswith("- ") else _rows(block[0]))


def _bullets(block: str) -> Iterator[str]:
    for bullet in re.split(r"^- ", block, flags=re.MULTILINE)[1:]:
        text = " ".join(bullet.split())
        lead = re.match(r"\*\*(.+?)\*\*", text) or re.match(r"(.+?)[.:;](?: |$)", text)
        yield _plain(lead[1] if lead else text)


def _rows(block: str) -> Iterator[str]:
    for row in block.splitlines()[2:]:
        yield _plain(row.strip("| ").split(" | ")[0])


def _plain(text: str) -> str:
    """The words alone, without links, marks and the stop at the end."""
    text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text)
    return re.sub(r"[*`]", "", text).strip(" .:,")


def listed() -> dict[Passage, dict[str, list[str]]]:
    """The tests of each promise of each passage, by their names."""
    pages = tomllib.loads(LISTED.read_text())
    return {
        Passage(page, line): promises
        for page, passages in pages.items()
        for line, promises in passages.items()
    }


@cache
def tests() -> dict[str, list[str]]:
    """The files in which there is a test of each name; below tests/."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in _TEST.findall(path.read_text()):
            found.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    return found


def resolve(name: str) -> str:
    """The id of a test: of its name, or of ``folder.name`` or ``file.name`` where several have it.

    Raises:
        LookupError: none has it, or several have.
    """
    place, _, test = name.rpartition(".")
    paths = tests().get(test, [])
    if place:
        paths = [path for path in paths if {place, f"test_{place}.py"} & set(Path(path).parts)]
    if len(paths) != 1:
        where = ", ".join(paths) or "no file"
        raise LookupError(f"tests/promises.toml: the test {name!r} is in {where}")
    return f"{paths[0]}::{test}"


def page() -> str:
    """The promises, page by page, each with the tests that hold it."""
    lines: list[str] = []
    for passage, promises in listed().items():
        lines += ["", f"## {_heading(passage)}", ""]
        for promise in passage.entries():
            if promise not in promises:
                raise LookupError(f"{passage.page}: {promise!r} has no test in tests/promises.toml")
            lines.append(f"- {promise}\n  - `" + "`\n  - `".join(promises[promise]) + "`")
    return "\n".join(lines[1:]) + "\n"


def _heading(passage: Passage) -> str:
    """The title of the page, with a link to it, and what stands above the promises."""
    title = re.search(r"^# (.*)$", (ROOT / passage.page).read_text(), re.MULTILINE)
    if title is None:
        raise LookupError(f"{passage.page} has no title")
    place = passage.page.removeprefix("docs/")
    name = f"[{title[1]}](../{place})" if place != passage.page else title[1]
    section = _plain(passage.line.lstrip("# "))
    return f"{name}: {section}" if section else name
