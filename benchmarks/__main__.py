"""``python -m benchmarks``: measure, and write a table and ``benchmarks/results.json``.

Everything compared runs in turn, round after round, and each round begins with another one, so that
what disturbs the machine disturbs all alike. Figures are medians over the rounds; ratios are taken
within a round. Absolute times say something about this machine only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import psutil
import redis
from rich.console import Console
from rich.table import Table

from benchmarks import Measure, Measures, tasks
from benchmarks.load import Loader
from dflockd.sync_client import DistributedLock
from examples.demo import stage

RESULTS = Path(__file__).parent / "results.json"
COMPARED = ("celery", "redis", "uvloop", "celery-once", "celery-singleton")


class BareServer(stage.LockServer):
    def _command(self) -> list[str]:
        return [sys.executable, "-m", "benchmarks.bare_server"]


def server_cpu(server: stage.Process, port: int, connections: int, turns: int) -> Measure:
    """Microseconds of the server's CPU for one acquire and release."""
    process = psutil.Process(server.pid)
    loader = Loader(port, connections)
    loader.run(turns // 4)

    def measure() -> float:
        before = process.cpu_times()
        loader.run(turns)
        after = process.cpu_times()
        used = after.user + after.system - before.user - before.system
        return float(used) / turns * 1e6

    return measure


def with_lock(enter: Callable[[], object], turns: int) -> Measure:
    """Microseconds for one uncontended acquire and release, seen by the caller."""

    def measure() -> float:
        started = time.perf_counter()
        for _ in range(turns):
            enter()
        return (time.perf_counter() - started) / turns * 1e6

    measure()
    return measure


@contextmanager
def stages(turns: int, sent: int) -> Iterator[dict[str, Measures]]:
    """Start what is compared, and give the measures by topic."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        socket = directory / "dflockd.sock"
        ours = stack.enter_context(stage.LockServer(directory, "--unix-socket", str(socket)))
        bare = stack.enter_context(BareServer(directory, name="bare"))
        broker = stack.enter_context(stage.Redis(directory))
        client = redis.Redis(unix_socket_path=str(broker.socket))
        servers = [(ours.host, ours.port)]

        def locked() -> None:
            with DistributedLock("bench", servers=servers):
                pass

        def redis_locked() -> None:
            with client.lock("bench", timeout=33):
                pass

        exchange = Loader(ours.port, 1)
        topics: dict[str, Measures] = {
            f"server CPU per acquire + release, {number} connections (us)": {
                "dflockd": server_cpu(ours, ours.port, number, turns),
                "a server that does not look": server_cpu(bare, bare.port, number, turns),
            }
            for number in (16, 64, 256)
        }
        topics["with lock: pass (us)"] = {
            "DistributedLock": with_lock(locked, turns // 10),
            "bare socket, same exchange": lambda: exchange.run(turns // 10) / (turns // 10) * 1e6,
            "redis-py Lock": with_lock(redis_locked, turns // 10),
        }
        topics.update(stack.enter_context(tasks.topics(directory, broker, socket, sent)))
        yield topics


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=20_000, help="acquires in one round")
    parser.add_argument("--tasks", type=int, default=1000, help="tasks for one throughput")
    options = parser.parse_args()
    # Whatever ends the benchmarks, the processes that they started end with them.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    console = Console()
    results: dict[str, dict[str, list[float]]] = {}
    with stages(options.turns, options.tasks) as topics:
        for number in range(options.rounds):
            console.print(f"round {number + 1} of {options.rounds}")
            for topic, measures in topics.items():
                for name in turned(list(measures), number):
                    results.setdefault(topic, {}).setdefault(name, []).append(measures[name]())
    for topic, figures in results.items():
        console.print(table(topic, figures))
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in COMPARED},
        "rounds": options.rounds,
        "figures": results,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"Written to benchmarks/{RESULTS.name}.")
    return 0


def turned(names: list[str], number: int) -> list[str]:
    """The names in their order, beginning with another one in each round."""
    first = number % len(names)
    return names[first:] + names[:first]


def table(topic: str, figures: dict[str, list[float]]) -> Table:
    """The figures of one topic: the first one is ours, the ratios are ours to theirs."""
    ours, *_ = figures.values()
    drawn = Table(title=topic, title_justify="left")
    for column in ("", "median", "least", "most", "ours / this"):
        drawn.add_column(column, justify="left" if not column else "right")
    for name, values in figures.items():
        ratios = [mine / other for mine, other in zip(ours, values, strict=True) if other]
        ratio = f"{statistics.median(ratios):.2f}x" if values is not ours and ratios else ""
        drawn.add_row(
            name,
            *(f"{figure:.1f}" for figure in (statistics.median(values), min(values), max(values))),
            ratio,
        )
    return drawn


if __name__ == "__main__":
    sys.exit(main())
