"""A real browser of this machine, for what people see."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Playwright

AXE = ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"]
"""The rules that a page is held to."""


def chromium(api: Playwright) -> str | None:
    """Return a browser of this machine, or Playwright's own if it has one here."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    own = api.chromium.executable_path
    return own if Path(own).exists() else None


@contextmanager
def started() -> Iterator[Browser]:
    """Start it; without one, skip the test."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: no browser test")
    with playwright.sync_playwright() as api:
        path = chromium(api)
        if path is None:
            pytest.skip("no chromium on PATH")
        # Its sandbox needs rights that containers seldom have; it sees nothing but these pages.
        browser = api.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def barriers(page: Page, *, colours: bool = True) -> list[str]:
    """What axe-core finds on a page that keeps somebody from using it: the rule, and where.

    The contrast of all `colours` is half of the work.
    """
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core").Axe()
    options = {"runOnly": AXE, "rules": {"color-contrast": {"enabled": colours}}}
    found = axe.run(page, options=options).response["violations"]
    return [f"{rule['id']}: {node['html'][:200]}" for rule in found for node in rule["nodes"]]
