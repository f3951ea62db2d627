"""The site of the manual, as `make docs` has built it: everybody can use its pages."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from examples.demo.stage import ROOT
from tests import browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SITE = ROOT / "build" / "docs"
PAGES = sorted(
    path.relative_to(SITE).as_posix()
    for path in SITE.rglob("*.html")
    if "_static" not in path.parts
)
FEW = ["index.html", "howto/flask.html", "reference/options.html", "search.html"]
"""Of each kind, one: pictures, code, tables."""

WIDE = {"viewport": {"width": 1200, "height": 900}, "reduced_motion": "reduce"}
PHONE = {"viewport": {"width": 390, "height": 844}, "reduced_motion": "reduce"}

pytestmark = [pytest.mark.site, pytest.mark.skipif(not PAGES, reason="`make docs` builds the site")]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser.started() as found:
        yield found


MISSING = """
[...document.images].filter((image) => !image.naturalWidth).map((image) => image.currentSrc)
"""


def look(
    opened: Browser, address: str, *, colours: bool = True, **how: Any
) -> tuple[list[str], int]:
    """What keeps somebody from using a page, and by how much it is wider than the screen."""
    context = opened.new_context(**how)
    try:
        page: Page = context.new_page()
        page.goto(address)
        beyond = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        found = page.evaluate(MISSING) + browser.barriers(page, colours=colours)
        return found, int(beyond)
    finally:
        context.close()


@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing(page: str, opened: Browser, url: str) -> None:
    """All but the colours, which come from the theme: those of a few pages stand for all."""
    assert look(opened, f"{url}/{page}", colours=False, **WIDE) == ([], 0)


@pytest.mark.parametrize("how", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", FEW)
def test_axe_finds_nothing_in_the_colours(
    page: str, scheme: str, how: dict[str, Any], opened: Browser, url: str
) -> None:
    assert look(opened, f"{url}/{page}", color_scheme=scheme, **how) == ([], 0)


@pytest.mark.soak
@pytest.mark.parametrize("how", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", sorted(set(PAGES) - set(FEW)))
def test_axe_finds_nothing_in_any_colours(
    page: str, scheme: str, how: dict[str, Any], opened: Browser, url: str
) -> None:
    assert look(opened, f"{url}/{page}", color_scheme=scheme, **how) == ([], 0)


def test_the_check_finds_barriers(opened: Browser) -> None:
    """A picture without words, and a text that is hardly darker than what it stands on."""
    context = opened.new_context()
    page = context.new_page()
    page.set_content(
        '<html lang="en"><title>x</title><main><h1>x</h1><img src="data:,">'
        '<p style="color: #ccc">pale</p></main></html>'
    )

    rules = {found.split(":")[0] for found in browser.barriers(page)}

    context.close()
    assert rules >= {"image-alt", "color-contrast"}
