"""A lock server that does not look at the token of a release."""

import sys
from typing import Any

from dflockd.cli import main
from dflockd.table.slots import Slots


def find_any(group: Any, space: Any, key: bytes, _token: bytes) -> Any:
    entry = group.spaces[space].get(key)
    return next(iter(entry.holds.values()), None) if entry is not None else None


if __name__ == "__main__":
    Slots.find = staticmethod(find_any)  # type: ignore[assignment, method-assign]
    sys.exit(main())
