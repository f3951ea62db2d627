"""A lock server in which a rate always has a place, and a fair group always has room."""

import sys
from typing import Any

from dflockd.cli import main
from dflockd.table.grouped import Lane
from dflockd.table.rates import KeyRate


def a_place(_rate: Any, _now: float) -> int:
    return 1


if __name__ == "__main__":
    KeyRate.free = a_place  # type: ignore[assignment]
    Lane.has_room = property(lambda _: True)  # type: ignore[assignment, method-assign]
    sys.exit(main())
