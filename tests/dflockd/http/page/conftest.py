"""The page of a server, in a browser."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser import started
from tests.dflockd.http.http_site import Site, StartSite
from tests.dflockd.http.page.page_support import OpenPage
from tests.dflockd.raw_server import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: no browser test")
    playwright.expect.set_options(timeout=3 * PATIENCE * 1000)
    with started() as found:
        yield found


@pytest.fixture
def beneath() -> Iterator[contextlib.ExitStack]:
    """What serves a page, and ends after it: else the page complains that nobody answers."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def open_page(
    browser: Browser, beneath: contextlib.ExitStack, start_site: StartSite
) -> Iterator[OpenPage]:
    """Open the page of a site; what the browser complains of fails the test.

    A test can say what is `to_be_expected` of it, whenever it comes.
    It ends before whatever `beneath` and `start_site` have started.
    """
    contexts: list[BrowserContext] = []
    complaints: list[str] = []
    to_be_expected: list[str] = []

    def open_(where: Site | str, **options: object) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda said: (
                complaints.append(said.text) if said.type in ("error", "warning") else None
            ),
        )
        page.goto(where if isinstance(where, str) else where.url)
        from playwright.sync_api import expect

        expect(page.locator("#state")).to_have_attribute("data-state", "ready")
        return page

    open_.to_be_expected = to_be_expected  # type: ignore[attr-defined]
    yield open_
    for context in contexts:
        context.close()
    assert not [said for said in complaints if not any(word in said for word in to_be_expected)]
