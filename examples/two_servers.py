"""Keys spread over two lock servers: each key lives on one of them, always the same.

dflockd --host 127.0.0.1 --port 6388
dflockd --host 127.0.0.1 --port 6389
DFLOCK_SERVERS=127.0.0.1:6388,127.0.0.1:6389 python -m examples.two_servers
"""

from dflockd.sharding import stable_hash_shard
from dflockd.sync_client import DistributedLock
from examples import celeryconfig

if __name__ == "__main__":
    # The same list in the same order everywhere: the order says which key lives where.
    servers = celeryconfig.dflock_servers.split(",")
    for key in ("account:1", "account:2", "account:3", "account:4"):
        with DistributedLock(key, servers=servers) as lock:
            number = stable_hash_shard(key, len(servers))
            print(f"{key} lives on server {number}, {lock.server}, fence {lock.fence}")
