"""A lock server in which a rate always has a place, and no fair group has a limit."""

import sys
from typing import Any

from dflockd.cli import main
from dflockd.table.grouped import Lane
from dflockd.table.rates import KeyRate


def a_place(_rate: Any, _now: float) -> int:
    return 1


if __name__ == "__main__":
    KeyRate.free = a_place  # type: ignore[assignment]
    Lane.limit = property(lambda _: 0, lambda _, limit: None)  # type: ignore[assignment, misc]
    sys.exit(main())
