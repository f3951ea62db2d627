"""What a key may be."""

from __future__ import annotations

import re

from dflockd.wire.messages import MAX_LINE

_forbidden = re.compile(rb"[\0\t-\r\x1c-\x20]").search  # as `str.isspace` has it


def key_problem(key: bytes) -> str | None:
    """Say in a few words why `key` cannot be sent, or return ``None`` if it can."""
    if not key:
        return "is empty"
    if len(key) > MAX_LINE:
        return f"has {len(key)} bytes, {MAX_LINE} are allowed"
    if key.isascii():
        if _forbidden(key):
            return "contains white space or NUL"
        return None
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return "is not UTF-8"
    if "\0" in text or text.split() != [text]:
        return "contains white space or NUL"
    return None
