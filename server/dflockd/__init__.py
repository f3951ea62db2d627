"""dflockd: a small lock server with FIFO locks, leases and fences, and its clients.

`dflockd.sync_client` and `dflockd.client` (asyncio) are for programs that lock, `dflockd.sharding` for
those with several servers, ``python -m dflockd`` is the server.
"""

__version__ = "0.1.0"
