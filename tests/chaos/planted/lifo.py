"""A lock server whose last waiter comes first."""

import sys
from typing import Any

from dflockd.cli import main
from dflockd.table.slots import Slots

promote = Slots.promote


def promote_last(self: Slots, entry: Any, now: float, effects: Any) -> None:
    line = entry.queue().line
    if line:
        line.move_to_end(next(reversed(line)), last=False)
    promote(self, entry, now, effects)


if __name__ == "__main__":
    Slots.promote = promote_last  # type: ignore[method-assign]
    sys.exit(main())
