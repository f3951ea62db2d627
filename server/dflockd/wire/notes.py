"""Keys that programs keep notes under: nobody works while they are held, and views leave them out.

With these, `celery_dflock` remembers what has been run and what was replaced. Views of holders are
about work, so they show notes only if asked to.
"""

from __future__ import annotations

import re
from typing import Final

_is_note: Final = re.compile(rb"(?:^|[^A-Za-z0-9])(?:celery-done:|replaced:[0-9a-f]{8}-)").search


def is_note(key: bytes) -> bool:
    """Whether a key is that of a note, in an application with or without a prefix of its own."""
    # The first is quick, and what nearly all keys have not.
    return (b"celery-done:" in key or b"replaced:" in key) and _is_note(key) is not None
