"""How often this process was forked off from another: what was made before is the parent's."""

from __future__ import annotations

count = 0
"""Grows with every fork on the way to this process. It costs less to look at than `os.getpid`."""


def note() -> None:
    """Take in that this process has just been forked off."""
    global count
    count += 1
