"""The lock server and its commands where a cluster has few shards, and nothing else is different.

Most of what thousands of shards cost is that there are thousands. Tests that are about them start
`dflockd` itself.
"""

import sys
from functools import partial

from dflockd import config
from dflockd.cli import main
from dflockd.cluster import commands
from dflockd.cluster.parameters import ClusterParameters
from dflockd.shards import Cluster, get_shard_id

SHARDS = 256

if __name__ == "__main__":
    for module, name, value in (
        (config, "ClusterParameters", partial(ClusterParameters, SHARDS)),
        (commands, "Cluster", partial(Cluster, num_shards=SHARDS)),
        (commands, "get_shard_id", partial(get_shard_id, num_shards=SHARDS)),
        (commands, "NUM_SHARDS", SHARDS),
    ):
        setattr(module, name, value)
    sys.exit(main())
