"""A lock server whose last waiter comes first."""

import sys
from typing import Any

from dflockd.cli import main
from dflockd.table import LockTable

promote = LockTable._promote


def promote_last(self: LockTable, entry: Any, now: float, effects: Any) -> None:
    line = entry.queue().line
    if line:
        line.move_to_end(next(reversed(line)), last=False)
    promote(self, entry, now, effects)


if __name__ == "__main__":
    LockTable._promote = promote_last  # type: ignore[method-assign, assignment]
    sys.exit(main())
