"""How much a table gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

STEP: Final = 100
"""How much may happen in one step that nobody asked for: the next request must not wait for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much the table gives; times in seconds."""

    default_lease: int = 33
    """Lease of a request that names none."""
    max_lease: int = 3600
    """Longest lease: a longer one is refused, for it could lock a key forever."""
    max_detached_lease: int = 3600
    """Longest lease of a hold that is detached."""
    max_locks: int = 1024
    """Most keys that are held or waited for at once. Keys beyond it are refused, not known ones."""
    max_waiters: int = 0
    """Most waiters of one key; 0 is no limit."""
    max_holds: int = 10_000
    """Most holds and most queue positions of one connection, and most holders of one key; 0 is no
    limit."""
    max_rate_window: int = 86_400
    """Longest window of a rate."""
    max_rate_runs: int = 1_000_000
    """Most beginnings that may have to be remembered at once: the sum of what all rates allow in
    their windows. A new rate is refused beyond it, known ones are not."""
    auto_release: bool = True
    """Whether the end of a connection releases what it holds. Its waiters leave in any case."""
    orphan_ttl: int = 0
    """How long the holds of a connection that broke off wait for a renewal before release."""
    orphan_all: bool = False
    """Whether that applies to every connection that has ended, even to one that was closed."""
