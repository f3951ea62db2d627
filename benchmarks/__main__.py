"""``python -m benchmarks``: measure, and write a table, a record, the plots and docs/speed.md."""

from __future__ import annotations

import argparse
import importlib
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import interpreters, record, table
from benchmarks.bench import Bench, LeftOutError
from benchmarks.loads import NAMES
from benchmarks.record import Rounds

MORE = 10.0
"""Seconds for which there may be more rounds of a load whose ratios have not settled."""


def main() -> int:
    options = parse()
    # Whatever ends the benchmarks, the processes that they started end with them.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    begun = time.monotonic()
    machine = record.machine()
    rounds = Rounds()
    failed = False
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        bench = Bench(Path(directory), options.quick)
        try:
            bench.python = options.server or interpreters.compiled()
        except LeftOutError as exc:
            bench.left_out["dflockd, compiled"] = str(exc)
        try:
            bench.compiled = interpreters.is_compiled(bench.python)
        except LeftOutError as exc:
            sys.exit(str(exc))
        for name in options.loads:
            bench.directory = Path(directory, name)
            bench.directory.mkdir()
            try:
                measure(name, bench, options.rounds, rounds)
            except (RuntimeError, OSError) as exc:
                failed |= not isinstance(exc, LeftOutError)
                bench.left_out[name] = str(exc)
    seconds = time.monotonic() - begun
    document = record.record(bench, options.rounds, seconds, machine, rounds.summaries())
    print(*table.lines(document["topics"]), sep="\n")
    print()
    for what, why in bench.left_out.items():
        print(f"Left out: {what}: {why}.")
    if failed:
        print("Something failed: nothing is written.")
        return 1
    if options.record:
        record.write(options.record, document)
        print(f"Written: {options.record}")
    if options.record == record.RESULTS:
        from benchmarks import report

        for path in report.write(document):
            print(f"Written: {path}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the lock server, its clients and the plugin beside what else there is. "
        f"A full run writes {record.RESULTS.name}, the plots and the figures of docs/speed.md.",
        epilog="DFLOCKD_GO names a binary of dflockd in Go, where none is on PATH.",
    )
    parser.add_argument(
        "loads", nargs="*", metavar="LOAD", help=f"those to run, else all: {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--server",
        metavar="PYTHON",
        help="the interpreter that runs our server, else that of `make compiled`, else this one",
    )
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument(
        "--quick", action="store_true", help="see that it runs; the figures mean nothing"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="where to write the record of a part or a quick run",
    )
    options = parser.parse_args()
    if unknown := [name for name in options.loads if name not in NAMES]:
        parser.error(f"no load is called {unknown[0]!r}; there are {', '.join(NAMES)}")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}: at least 1")
    if not options.loads and not options.quick and options.record is None:
        options.record = record.RESULTS
    options.loads = options.loads or list(NAMES)
    return options


def measure(name: str, bench: Bench, number: int, rounds: Rounds) -> None:
    """Run one load, and add its figures."""
    module = importlib.import_module(f"benchmarks.loads.{name}")
    begun = time.monotonic()
    with module.load(bench) as load:
        done = min(number, load.rounds or number)
        for each in range(done):
            rounds.add(load.topics, load.measure(each))
        end = time.monotonic() + (0 if bench.quick or load.rounds else MORE)
        while time.monotonic() < end and not rounds.are_steady(load.topics):
            rounds.add(load.topics, load.measure(done))
            done += 1
    print(f"{name}: {done} rounds in {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit("The benchmarks count CPU time and choose cores as Linux does: run them on Linux.")
    sys.exit(main())
