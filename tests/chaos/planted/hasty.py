"""A lock server that does not wait for the holders of a server whose shards it takes over."""

import sys

from dflockd.cli import main
from dflockd.cluster import ClusterParameters

if __name__ == "__main__":
    ClusterParameters.grace = property(lambda _: 0.0)  # type: ignore[assignment, method-assign]
    sys.exit(main())
