"""What the tests of clients in a cluster share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KEY = "account:7"

Make = Callable[..., Any]
"""Make a lock of the cluster, of this key unless another is given."""


async def is_granted(lock: Any) -> bool:
    """Acquire a lock, and give it back at once."""
    granted: bool = await lock.acquire()
    if granted:
        assert await lock.release() is True
    return granted
