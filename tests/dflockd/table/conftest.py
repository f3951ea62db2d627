"""Tables that are as most tests want them."""

from __future__ import annotations

import pytest

from dflockd.table import LockTable
from tests.dflockd.table.rates_support import Site
from tests.dflockd.table.turns_support import table_of


@pytest.fixture
def site() -> Site:
    """A table whose clock the test turns, asked for keys with rates."""
    return Site()


@pytest.fixture
def table() -> LockTable:
    """A table in which those who wait may want to be told of their turn."""
    return table_of()
