"""Every promise on the pages has a test, and every test that is named is there."""

from __future__ import annotations

import re

import pytest

from docs import promises

PASSAGES = list(promises.listed().items())
NAMES = [f"{passage.page} {passage.line}" for passage, _ in PASSAGES]
PROMISING = re.compile(
    r"^(?:## What (?:it promises|is promised)|.*this is guaranteed:)$", re.MULTILINE
)


@pytest.mark.parametrize(("passage", "held"), PASSAGES, ids=NAMES)
def test_each_promise_has_its_tests(passage: promises.Passage, held: dict[str, list[str]]) -> None:
    entries = passage.entries()
    assert len(set(entries)) == len(entries)
    assert set(entries) - set(held) == set(), "a promise without a test: see tests/promises.toml"
    assert set(held) - set(entries) == set(), "it is promised no longer"
    for names in held.values():
        assert names
        for name in names:
            promises.resolve(name)


def test_no_promise_is_left_out() -> None:
    """Whatever a page calls what it promises."""
    listed = {(passage.page, passage.line) for passage, _ in PASSAGES}
    for path in [promises.ROOT / "README.md", *(promises.ROOT / "docs").rglob("*.md")]:
        name = path.relative_to(promises.ROOT).as_posix()
        for line in PROMISING.findall(path.read_text()):
            assert any(page == name and line.startswith(start) for page, start in listed), line
