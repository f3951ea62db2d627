"""User-space instructions of a process, counted by valgrind's callgrind.

They hardly change from one run to the next, whatever else the machine does, where times do. They
say nothing of the kernel's work, of caches and of waiting.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.bench import LeftOutError

PATIENCE = 60.0
COMPILED, DIGEST, PYTHON, UVLOOP, REST = (
    "dflockd, compiled",
    "the digest in a token",
    "CPython and its objects",
    "uvloop",
    "the C library and the rest",
)
"""Where a process spends its instructions."""

NAMED = re.compile(r"(\w+)=\((\d+)\)(?: (.*))?")


def place(binary: str, function: str) -> str:
    """Return which of them a function of a binary belongs to."""
    if "blake2" in function.lower():
        return DIGEST
    name = Path(binary).name
    for part, found in {"mypyc": COMPILED, "python": PYTHON}.items():
        if part in name.partition(".")[0]:
            return found
    return UVLOOP if "uvloop" in binary else REST


def by_place(lines: Iterable[str]) -> Counter[str]:
    """Return the instructions of each place, and of all of them, as callgrind has written them.

    A line names the binary or the function that those below belong to, by a number that has its
    name once; or it has a position and a cost; what follows ``calls=`` is the cost of a function
    that has been called, and is counted there.
    """
    counts: Counter[str] = Counter()
    names: dict[tuple[str, str], str] = {}
    here = {"ob": "", "fn": ""}
    called = False
    for line in lines:
        if line[0] in "0123456789+-*":
            if not called:
                counts[place(here["ob"], here["fn"])] += int(line.split()[1])
            called = False
        elif line.startswith("calls="):
            called = True
        elif named := NAMED.match(line):
            kind, number, name = named.groups()
            kind = kind.removeprefix("c")
            if name:
                names[kind, number] = name
            if named[1] in here:
                here[named[1]] = names[kind, number]
    return counts


class Callgrind:
    """Counts the instructions of processes that it had started under valgrind.

    Args:
        directory: where callgrind writes what it has counted.

    Raises:
        LeftOutError: there is no valgrind here.
    """

    def __init__(self, directory: Path) -> None:
        if not all(map(shutil.which, ("valgrind", "vgdb"))):
            raise LeftOutError("there is no valgrind to count instructions with")
        self._directory = directory

    @property
    def prefix(self) -> list[str]:
        """What comes before the command of a process; it is not counted until it is asked about.

        A fixed seed of the hashes makes a process in Python take the same way in every run.
        """
        place = self._directory.resolve()
        written = (f"--callgrind-out-file={place}/callgrind.%p", f"--vgdb-prefix={place}/vgdb")
        valgrind = ("valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", *written)
        return ["env", "PYTHONHASHSEED=0", *valgrind]

    def per_turn(
        self, pid: int, run: Callable[[float], int], lengths: tuple[float, float]
    ) -> dict[str, float]:
        """Return the instructions of one turn: the difference between a short and a long run.

        What a run takes however long it is, is not in it. Everything is warm by then.

        Args:
            pid: of a process under callgrind.
            run: has it take turns, and returns how many; it is given a length.
            lengths: of the short run and of the long one.

        Returns:
            The instructions of each place, all threads together.
        """
        run(lengths[1])
        self._tell(pid, "instrumentation", "on")
        run(lengths[0])
        self._counted(pid)
        (few, before), (many, after) = [(run(each), self._counted(pid)) for each in lengths]
        self._tell(pid, "instrumentation", "off")
        after.subtract(before)
        return {name: count / (many - few) for name, count in after.items()}

    def _counted(self, pid: int) -> Counter[str]:
        """Return the instructions since this was asked last."""
        self._tell(pid, "dump")
        dumps = self._directory.glob(f"callgrind.{pid}.*")
        latest = max(dumps, key=lambda path: int(path.suffix[1:]))
        lines = latest.read_text().splitlines()
        counts = by_place(filter(None, lines))
        if f"totals: {counts.total()}" not in lines:
            raise RuntimeError(f"{latest} has another total than {counts.total()}")
        return counts

    def _tell(self, pid: int, *words: str) -> None:
        pipes = f"--vgdb-prefix={self._directory.resolve()}/vgdb"
        command = ["vgdb", f"--pid={pid}", pipes, *words]
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        if told.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {told.stderr.strip()}")
