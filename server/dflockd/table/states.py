"""The states of a waiter, and which may follow which.

Plain integers: they are compared wherever a slot changes hands.
"""

from __future__ import annotations

from typing import Final

QUEUED: Final = 1
"""In the queue, by ``enqueue``, while its peer does something else."""
WAITING: Final = 2
"""In the queue, its peer blocked on it."""
UNTOLD: Final = 3
"""Granted by now, and its peer, which enqueued it, has not asked since: nobody knows of it."""
GRANTED: Final = 4
"""Granted as it enqueued; its peer knows, and has yet to say ``wait``."""
RESERVED: Final = 5
"""In the queue, and away."""
EXPECTED: Final = 6
"""In the queue, while a slot is held for it: it is away, or has its turn, blocked or not."""
PASSED: Final = 7
"""Its turn being over, for others go first: with a position to come back to, or to be taken up."""
GONE: Final = 8
"""No waiter any more: granted and told, out of time, out of reach or forgotten."""
LISTENING: Final = 9
"""In no queue: its peer is blocked on whether somebody newer wants what it holds."""

TRANSITIONS: Final[dict[int, frozenset[int]]] = {
    QUEUED: frozenset({WAITING, UNTOLD, EXPECTED, RESERVED, GONE}),
    WAITING: frozenset({QUEUED, EXPECTED, RESERVED, GONE}),
    UNTOLD: frozenset({GRANTED, GONE}),
    GRANTED: frozenset({GONE}),
    RESERVED: frozenset({QUEUED, EXPECTED, PASSED, GONE}),
    EXPECTED: frozenset({QUEUED, PASSED, GONE}),
    PASSED: frozenset({QUEUED, GONE}),
    GONE: frozenset(),
    LISTENING: frozenset({GONE}),
}
"""What may follow each state. A waiter begins as `QUEUED`, `GRANTED` or `LISTENING`."""
