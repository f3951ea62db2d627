"""docs/complaints.md: every entry names a public thread and tests that exist."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from docs import promises

PAGE = (promises.ROOT / "docs" / "complaints.md").read_text()
CAN_NO_LONGER, _, STILL_CAN = PAGE.partition("\n## What can still happen\n")

ENTRY = re.compile(r"^- .*\n(?:  .*\n)*", re.MULTILINE)
THREAD = re.compile(
    r"\[(?P<name>[\w.-]+)#(?P<number>\d+)\]"
    r"\(https://github\.com/[\w-]+/(?P<repository>[\w.-]+)/(?:issues|pull|discussions)/(?P<id>\d+)\)"
)
TEST = re.compile(r"^  `(?P<path>tests/\S+\.py)::(?P<name>\w+)`$", re.MULTILINE)

ENOUGH = 40


def entries(text: str) -> list[str]:
    return ENTRY.findall(text)


def title(entry: str) -> str:
    found = THREAD.search(entry)
    return found[0].partition("]")[0].strip("[") if found else entry[:40]


@pytest.mark.parametrize("entry", entries(CAN_NO_LONGER), ids=title)
def test_entry(entry: str) -> None:
    threads = list(THREAD.finditer(entry))
    assert threads, "it names no thread"
    assert entry.count("github.com") == len(threads), "a link is not of the form [name#1](...)"
    for thread in threads:
        assert thread["name"] == thread["repository"]
        assert thread["number"] == thread["id"]
    assert entry.count("**Here**") == 1, "what happened, and what happens here"
    tests = list(TEST.finditer(entry))
    assert tests, "it names no test"
    assert entry.count("::") == len(tests), "a test is not on a line of its own"
    for test in tests:
        assert test["path"] in promises.tests().get(test["name"], [])


def test_enough_threads_and_none_twice() -> None:
    named = Counter(thread[0] for thread in THREAD.finditer(CAN_NO_LONGER))
    assert len(named) >= ENOUGH
    assert set(named.values()) == {1}


def test_the_page_is_nothing_but_entries() -> None:
    """So that none of them escapes these tests."""
    for part, least in ((CAN_NO_LONGER, ENOUGH), (STILL_CAN, 1)):
        bullets = re.findall(r"^\s*[-*] ", part, re.MULTILINE)
        assert len(bullets) == len(entries(part)) >= least
