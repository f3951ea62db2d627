"""JSON that somebody else has written: a server, a store, or what listens at an address."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: bytes) -> Any:
    """Return what it says.

    Raises:
        ValueError: it cannot be read. A thousand brackets are enough for that, and Python calls it
            another error then, which nobody who reads a document expects.
    """
    try:
        return json.loads(text)
    except RecursionError as exc:
        raise ValueError(str(exc)) from None
