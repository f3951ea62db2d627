"""What servers turned out to know, remembered for some minutes: they may be replaced."""

from __future__ import annotations

from typing import Final

from dflockd.address import Address
from dflockd.client import clock

EXTENSIONS: Final = "extensions"
"""Anything beyond the published protocol. Published servers up to 1.8.0 hang up on who tries."""

OWNERS: Final = "owners"
"""To be told whose run asks, and its label along with that. Servers of 0.1 know labels alone."""

TURNS: Final = "turns"
"""To tell whose turn it is, and grant nothing."""

AGES: Final = "ages"
"""To be told how old a run is that asks: the newest wins."""

REMEMBERED = 300.0
"""Seconds for which it is."""

_found: dict[tuple[Address, str], tuple[bool, float]] = {}


def note(server: Address, what: str, *, knows: bool) -> None:
    """Remember whether a server knows something."""
    _found[server, what] = knows, clock.now() + REMEMBERED


def knows(server: Address, what: str) -> bool | None:
    """Whether a server knows something; ``None`` if that has to be found out."""
    found = _found.get((server, what))
    return found[0] if found is not None and clock.now() < found[1] else None


def forget_all() -> None:
    """Find all of it out anew."""
    _found.clear()
