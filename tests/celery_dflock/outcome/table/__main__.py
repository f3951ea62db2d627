"""Run the cells of the table, each with a real worker."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from examples.demo.stage import ROOT, LockServer, Redis
from tests.celery_dflock import jobs
from tests.celery_dflock.outcome import table as package
from tests.celery_dflock.outcome.table.expected import find
from tests.celery_dflock.outcome.table.side import BROKERS, POOLS, Finding, Side
from tests.celery_dflock.outcome.table.trials import OUTCOMES
from tests.celery_dflock.processes import Cluster
from tests.celery_dflock.rabbitmq.bus import Bus
from tests.celery_dflock.record import RECORD
from tests.rabbitmq import RabbitMQ

PAGE = ROOT / "docs" / "outcomes.md"
MARKED = re.compile(r"(<!-- begin: (\w+), [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)

TABLES = {"pools": list(POOLS), "brokers": list(BROKERS)}
"""The columns of the tables of the page, in its order."""

Found: TypeAlias = dict[str, dict[str, Finding]]


@contextlib.contextmanager
def stage(columns: list[str]) -> Iterator[dict[str, Side]]:
    """Everything that a run needs, for the command line."""
    with contextlib.ExitStack() as end:
        directory = Path(end.enter_context(tempfile.TemporaryDirectory(prefix="outcomes-")))
        redis = end.enter_context(Redis(directory))
        server = end.enter_context(LockServer(directory))
        patch = end.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(jobs.BROKER, redis.url)
        patch.setenv(RECORD, str(directory / "record.jsonl"))
        jobs.configure({jobs.BROKER: redis.url})
        cluster = Cluster(directory, server)
        sides = {pool: Side(pool, cluster, server) for pool in columns if pool in POOLS}
        kinds = {column: kind for column, kind in BROKERS.items() if column in columns}
        if kinds:
            rabbitmq = end.enter_context(RabbitMQ(directory))
            for column, kind in kinds.items():
                bus = end.enter_context(Bus(rabbitmq, cluster, kind, kind))
                sides[column] = Side("prefork", cluster, server, bus)
        for side in sides.values():
            end.callback(side.stop)
            side.start()
        yield sides
        # Results that never came would unsubscribe at a Redis that is gone.
        jobs.app.backend.result_consumer.stop()
        jobs.app.backend.result_consumer.subscribed_to.clear()
        jobs.app.close()


def table(found: Found, columns: list[str]) -> str:
    rows = ["| what happens | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    rows += [
        f"| {OUTCOMES[name].name} | " + " | ".join(str(cells[each]) for each in columns) + " |"
        for name, cells in found.items()
    ]
    return "\n".join(rows) + "\n"


def run(names: list[str], columns: list[str], runs: int) -> Found:
    """Each cell so many times; the slowest counts."""
    found: Found = {}
    with stage(columns) as sides:
        for name in names:
            found[name] = {}
            for column in columns:
                findings = [find(name, sides[column]) for _ in range(runs)]
                found[name][column] = max(findings, key=lambda finding: finding.seconds or 0.0)
                print(f"{name:18} {column:9} {found[name][column]}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=package.__doc__.splitlines()[0])
    parser.add_argument(
        "only", nargs="*", help="outcomes, pools and kinds of queues; all by default"
    )
    parser.add_argument("--show", action="store_true", help="leave the page as it is")
    parser.add_argument("--runs", type=int, default=1, help="of each cell; the slowest counts")
    options = parser.parse_args()
    named = [
        column for column in (*POOLS, *BROKERS) if {column, BROKERS.get(column)} & set(options.only)
    ]
    columns = named or [*POOLS, *BROKERS]
    names = [name for name in OUTCOMES if name in options.only] or list(OUTCOMES)
    found = run(names, columns, options.runs)
    if options.show or options.only:
        print(table(found, columns))
    else:
        tables = {name: table(found, columns) for name, columns in TABLES.items()}
        PAGE.write_text(
            MARKED.sub(lambda page: page[1] + tables[page[2]] + page[3], PAGE.read_text())
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
