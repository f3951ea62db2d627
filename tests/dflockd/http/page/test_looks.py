"""How the page looks: themes, small screens, and what somebody sees who sees little."""

from __future__ import annotations

import pytest

from tests.browser import barriers
from tests.dflockd.http.http_site import SECRET, Site, named
from tests.dflockd.http.page.page_support import OpenPage, row_of

pytest.importorskip("playwright.sync_api", reason="no playwright: no browser test")

from playwright.sync_api import Page, expect


def test_themes(site: Site, open_page: OpenPage) -> None:
    page = open_page(site, color_scheme="dark")

    def ground() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    dark = ground()
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Theme: light")
    light = ground()
    assert light != dark
    page.reload()
    assert ground() == light
    page.locator("#theme").click()
    assert ground() == dark


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_is_cut_off_on_a_small_screen(site: Site, open_page: OpenPage, width: int) -> None:
    client = named(site, f"a.task.with.a.long.name[{'0' * 36}] {'host.' * 20} pid 1")
    client.lock(f"long:{width}:" + "x" * 240)
    page = open_page(site, viewport={"width": width, "height": 800})
    page.locator(".toggle", has_text=f"long:{width}:").click()
    expect(page.locator("tr.detail ul li")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_finds_nothing(closed_site: Site, open_page: OpenPage, scheme: str, width: int) -> None:
    """Each state of the page: empty, keys and queues, one opened, dialogs, no answer to a search."""

    def clean(what: str) -> None:
        # Rows that have just come, changed or gone are of another colour for a moment.
        expect(page.locator("tr.key:is(.new, .changed, .gone)")).to_have_count(0)
        assert barriers(page) == [], what

    credentials = {"username": "ann", "password": SECRET}
    page = open_page(
        closed_site,
        http_credentials=credentials,
        color_scheme=scheme,
        viewport={"width": width, "height": 900},
        reduced_motion="reduce",
    )
    clean("at first")
    holder = named(closed_site, "shop.sync[11-aaaa] w1 pid 7")
    key = f"axe:{scheme}:{width}"
    holder.lock(key, "0 60")
    waiter = named(closed_site, "shop.sync[22-bbbb] w2 pid 8")
    waiter.request("l", key, "60")
    row_of(page, key).locator(".toggle").click()
    expect(page.locator("tr.detail ol li")).to_have_count(1)
    page.locator("#search").fill("22-bbbb")
    expect(row_of(page, key).locator(".found")).to_be_visible()
    clean("a key, opened and found")
    page.get_by_role("button", name="Release…").click()
    clean("the dialog of a release")
    page.get_by_role("button", name="Keep it").click()
    page.locator("#search").fill("no such")
    expect(page.locator("#empty")).to_be_visible()
    clean("nothing found")


def colours(page: Page, locator: str, which: str) -> tuple[float, ...]:
    """The colour that is computed, as red, green and blue from 0 to 1."""
    return tuple(
        page.evaluate(
            """([selector, property]) => {
                const canvas = document.createElement("canvas").getContext("2d");
                canvas.fillStyle = getComputedStyle(document.querySelector(selector))[property];
                canvas.fillRect(0, 0, 1, 1);
                return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((c) => c / 255);
            }""",
            [locator, which],
        )
    )


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_no_text_can_be_seen(site: Site, open_page: OpenPage, scheme: str) -> None:
    """WCAG asks for 3:1 of what has to be seen: bars, borders of inputs, curves."""
    site.server.connect().lock(f"seen:{scheme}")
    page = open_page(site, color_scheme=scheme)
    expect(row_of(page, f"seen:{scheme}")).to_have_count(1)
    track = colours(page, ".lease div", "backgroundColor")
    for level in ("good", "fair", "poor"):
        page.evaluate("(level) => document.querySelector('.lease').dataset.level = level", level)
        assert contrast(colours(page, ".lease i", "backgroundColor"), track) >= 3, level
    ground = colours(page, "body", "backgroundColor")
    for each in ("#search", "#sort", "#theme", "kbd"):
        assert contrast(colours(page, each, "borderTopColor"), ground) >= 3, each
    sheet = colours(page, "#totals", "backgroundColor")
    assert contrast(colours(page, "#totals polyline", "stroke"), sheet) >= 3
    for what in ("ready", "not-ready", "away", "unknown"):
        page.evaluate("(what) => document.querySelector('#state').dataset.state = what", what)
        assert contrast(colours(page, "#state i", "backgroundColor"), ground) >= 3, what
