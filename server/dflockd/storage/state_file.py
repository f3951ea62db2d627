"""The state file: the few facts that must be right before the journal can be read.

JSON, so that people can read it, with a checksum over all of it. It is replaced in one step.
"""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Mapping
from typing import Any

from dflockd.wire import read_json

NAME = "state.json"

FORMAT = 2

SECRET = 32
"""Bytes of the secret."""

IDENTITY = 16
"""Bytes of the identity."""

LONG_AGO = -1e9
"""A time of the machine's clock: no window that began then lasts until the machine is started."""

NEW: dict[str, Any] = {
    "format": FORMAT,
    # What tells the segments of this directory from those of others, in hexadecimal.
    "identity": "",
    # What the digests of tokens are keyed with, in hexadecimal.
    "secret": "",
    # Which generation of the journal counts; 0 before the first.
    "generation": 0,
    # The boot of the machine to which the times here and in the journal belong; empty if that is not
    # known, or if a sync has failed on it.
    "boot": "",
    # Whether everything was on the disk when the process ended, and when that was.
    "clean": True,
    "stopped": 0.0,
    # Number and end of each segment, after a clean stop.
    "segments": [],
    # Until when holders that were forgotten are waited for.
    "recovers_until": 0.0,
    # Runs of keys with a rate may have begun before that of which nothing is known.
    "rates_since": LONG_AGO,
    # Seconds that no lease exceeds that may be out.
    "longest_lease": 0,
    # A fence beyond all that were given out, should the journal be lost.
    "fence": 0,
}
"""The state file before its first use. All of its fields are these, of these types."""


class StateFileError(Exception):
    """It cannot be used; the text says why, and nothing of what is in it."""


class OtherFormatError(Exception):
    """It, or the journal, is of another version of dflockd; the text says what tells that."""


def new() -> dict[str, Any]:
    """Return the state of a directory before its first use."""
    return {
        **NEW,
        "identity": secrets.token_hex(IDENTITY),
        "secret": secrets.token_hex(SECRET),
    }


def dump(state: Mapping[str, Any]) -> bytes:
    """Return the text of a state."""
    return json.dumps({**state, "checksum": _checksum(state)}, indent=1).encode()


def load(text: bytes) -> dict[str, Any]:
    """Return the state that a text says.

    Raises:
        OtherFormatError: it is of another version.
        StateFileError: it is damaged.
    """
    try:
        known = read_json(text)
        if known["format"] != FORMAT:
            raise OtherFormatError(f"format {known['format']}")
        state = dict(known)
        checksum = state.pop("checksum")
        is_intact = checksum == _checksum(state)
        if state.keys() != NEW.keys():
            raise KeyError("fields")
        for name, default in NEW.items():
            if type(state[name]) is not type(default):
                raise TypeError(name)
        if len(bytes.fromhex(state["secret"])) != SECRET:
            raise ValueError("secret")
        if len(bytes.fromhex(state["identity"])) != IDENTITY:
            raise ValueError("identity")
        if not is_intact:
            raise ValueError("checksum")
    except (ValueError, KeyError, TypeError) as exc:
        # Not what is wrong with it in detail: a part of the secret could be in that.
        raise StateFileError(type(exc).__name__) from None
    return state


def _checksum(state: Mapping[str, Any]) -> str:
    text = json.dumps({name: state[name] for name in sorted(state)}, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"
