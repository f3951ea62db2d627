"""What is seen on the page of a server, and what is done beneath it."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from tests.dflockd.http.http_site import Site
from tests.dflockd.raw_server import granted

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

T = TypeVar("T")

OpenPage = Callable[..., Any]
"""Opens the page of a site."""


def row_of(page: Page, key: str) -> Locator:
    return page.locator(
        "tr.key:not(.gone)", has=page.locator("code", has_text=re.compile(f"^{re.escape(key)}$"))
    )


def lock_many(site: Site, name: str, number: int) -> None:
    """Take so many locks on one connection."""
    client = site.server.connect()
    client.send("".join(f"l\n{name}:{n:04}\n0 300\n" for n in range(number)).encode())
    for _ in range(number):
        granted(client.line())


def apart(work: Callable[..., T], *args: object) -> T:
    """Do what needs an event loop of its own: Playwright has one running here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *args).result()
