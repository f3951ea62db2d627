"""The lock table: requests in, replies out, time as an argument.

Pure: no socket, no clock, no thread, no asyncio. Everything that must never go wrong in a lock
service is decided here, in one synchronous step for each event, so that it can be tested against a
naive model with a clock that the test turns.
"""

from dflockd.table.counts import Counts, Histogram
from dflockd.table.deadlines import Deadlines
from dflockd.table.issuer import TokenIssuer
from dflockd.table.sharded import Directory, Place, ShardTable, Snapshot
from dflockd.table.state import Absence, Entry, Group, Hold, HoldRecord, Peer, Waiter
from dflockd.table.table import Effect, Limits, LockTable

__all__ = [
    "Absence",
    "Counts",
    "Deadlines",
    "Directory",
    "Effect",
    "Entry",
    "Group",
    "Histogram",
    "Hold",
    "HoldRecord",
    "Limits",
    "LockTable",
    "Peer",
    "Place",
    "ShardTable",
    "Snapshot",
    "TokenIssuer",
    "Waiter",
]
