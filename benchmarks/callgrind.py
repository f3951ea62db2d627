"""User-space instructions of a process, counted by valgrind's callgrind.

They hardly change from one run to the next, whatever else the machine does, where times do. They
say nothing of the kernel's work, of caches and of waiting.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.bench import LeftOutError

PATIENCE = 60.0
TOTAL = re.compile(rb"^totals: (\d+)$", re.MULTILINE)


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
    ) -> float:
        """Return the instructions of one turn: the difference between a short and a long run.

        What a run takes however long it is, is not in it. Everything is warm by then.

        Args:
            pid: of a process under callgrind.
            run: has it take turns, and returns how many; it is given a length.
            lengths: of the short run and of the long one.
        """
        run(lengths[1])
        self._tell(pid, "instrumentation", "on")
        run(lengths[0])
        self._counted(pid)
        (few, before), (many, after) = [(run(each), self._counted(pid)) for each in lengths]
        self._tell(pid, "instrumentation", "off")
        return (after - before) / (many - few)

    def _counted(self, pid: int) -> int:
        """Return the instructions of all threads since this was asked last."""
        self._tell(pid, "dump")
        dumps = self._directory.glob(f"callgrind.{pid}.*")
        latest = max(dumps, key=lambda path: int(path.suffix[1:]))
        total = TOTAL.search(latest.read_bytes())
        if total is None:
            raise RuntimeError(f"there is no total in {latest}")
        return int(total[1])

    def _tell(self, pid: int, *words: str) -> None:
        pipes = f"--vgdb-prefix={self._directory.resolve()}/vgdb"
        command = ["vgdb", f"--pid={pid}", pipes, *words]
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        if told.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {told.stderr.strip()}")
