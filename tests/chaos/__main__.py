"""`python -m tests.chaos`: a chaos run.

The exit status is 1 if anything was found to be wrong, 2 if it could not be run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from examples.demo.stage import StageError
from tests.chaos.driver import run
from tests.chaos.faults import ALL_FAULTS, FAULTS
from tests.chaos.options import CLUSTER_LEASE, CLUSTER_SERVING_LEASE, Options


def main() -> int:
    # Whatever ends the run, the processes that it started end with it.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    number = parser.add_argument
    number("--seed", type=int, default=time.time_ns() % 1_000_000, help="repeats a schedule")
    number("--seconds", type=float, default=60, help="how long the faults last")
    number("--servers", type=int, help="by default one, or three of a cluster")
    number("--workers", type=int, default=Options.workers, help="Celery workers of 2 processes")
    number("--clients", type=int, default=Options.clients, help="processes that use the clients")
    number("--keys", type=int, default=Options.keys)
    number("--lease", type=int, help="seconds; by default 3, in a cluster 14")
    number("--pace", type=float, default=Options.pace, help="seconds between two faults of one")
    number("--work", type=float, default=Options.work, help="longest of usual critical sections")
    number("--long", type=float, default=Options.long, help="share of sections as long as a lease")
    number("--aside", type=float, default=Options.aside, help="longest pause of a client's thread")
    number("--rate", type=float, default=Options.rate, help="tasks sent in a second")
    number(
        "--faults",
        type=lambda text: [name.strip() for name in text.split(",")],
        default=list(FAULTS),
        help=f"which of {', '.join(ALL_FAULTS)}; by default all but server-shift, which needs root",
    )
    number("--state-dir", type=Path, help="of the servers; by default in that of the run")
    number(
        "--stateless",
        action="store_true",
        help="no state directory: a server that is killed forgets its locks, as its manual says",
    )
    number("--server", default=Options.server, help="the server: a module for python -m")
    number(
        "--cluster",
        type=int,
        nargs="?",
        const=CLUSTER_SERVING_LEASE,
        metavar="SERVING_LEASE",
        dest="serving_lease",
        help="the servers share an etcd; with this --cluster-serving-lease, in seconds",
    )
    number("--etcd", type=int, default=Options.etcd, help="members of the etcd of a cluster")
    number("--wait", choices=["slot", "consumer"], default=Options.wait, help="where tasks wait")
    number("--heedless", action="store_true", help="clients ignore the ends of their leases")
    number("--directory", type=Path, help="for the history and the logs; a new one by default")
    given = parser.parse_args()
    if unknown := set(given.faults) - set(ALL_FAULTS):
        parser.error(f"--faults: {', '.join(sorted(unknown))}: choose from {', '.join(ALL_FAULTS)}")
    if given.serving_lease is not None and given.state_dir is not None:
        parser.error("--state-dir: the servers of a cluster have none")
    is_cluster = given.serving_lease is not None
    given.servers = given.servers or (3 if is_cluster else Options.servers)
    given.lease = given.lease or (CLUSTER_LEASE if is_cluster else Options.lease)
    given.directory = given.directory or Path(tempfile.mkdtemp(prefix="chaos-"))
    if not vars(given).pop("stateless") and not is_cluster:
        given.state_dir = given.state_dir or given.directory / "state"
    options = Options(**vars(given))
    print(f"seed {options.seed}, everything in {options.directory}", flush=True)
    try:
        outcome = run(options)
    except StageError as error:
        print(error, file=sys.stderr)
        return 2
    print(outcome.report())
    return 1 if outcome.findings or outcome.complaints or outcome.unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
