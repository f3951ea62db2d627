"""The lock table: requests in, replies out, time as an argument.

Pure: no socket, no clock, no thread, no asyncio. Everything that must never go wrong in a lock
service is decided here, in one synchronous step for each event. So it can be tested against a naive
model, with a clock that the test turns.
"""

from dflockd.table.counts import Counts, Histogram
from dflockd.table.deadlines import Deadlines
from dflockd.table.identity import Identity
from dflockd.table.issuer import TokenIssuer
from dflockd.table.limits import Limits
from dflockd.table.line import ReservedPosition
from dflockd.table.newest import Newest, NewestRecord
from dflockd.table.sharded import Directory, ShardTable, Snapshot, WaiterRecord
from dflockd.table.slots import Effect
from dflockd.table.state import Change, Entry, Hold, HoldRecord, Partition, Peer, Waiter
from dflockd.table.table import LockTable

__all__ = [
    "Change",
    "Counts",
    "Deadlines",
    "Directory",
    "Effect",
    "Entry",
    "Histogram",
    "Hold",
    "HoldRecord",
    "Identity",
    "Limits",
    "LockTable",
    "Newest",
    "NewestRecord",
    "Partition",
    "Peer",
    "ReservedPosition",
    "ShardTable",
    "Snapshot",
    "TokenIssuer",
    "Waiter",
    "WaiterRecord",
]
