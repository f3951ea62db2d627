"""Tables that are as most tests want them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dflockd.table import LockTable
from tests.dflockd.table.turns_support import table_of

if TYPE_CHECKING:
    from tests.dflockd.table.rates_support import Site


@pytest.fixture
def site() -> Site:
    """A table whose clock the test turns, asked for keys with rates."""
    # It needs the journal and the cluster, which Windows has not; rules of the table run there.
    from tests.dflockd.table.rates_support import Site

    return Site()


@pytest.fixture
def table() -> LockTable:
    """A table in which those who wait may want to be told of their turn."""
    return table_of()
