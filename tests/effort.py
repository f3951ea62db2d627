"""How much a test tries: a little in every run, much in the soak."""

from __future__ import annotations

from typing import Any

import pytest


def more(*values: object) -> Any:
    """Another case of what is tested anyway: each takes its seconds."""
    return pytest.param(*values, marks=pytest.mark.soak)


seconds = pytest.mark.parametrize("seconds", [pytest.param(0.5, id="briefly"), more(5)])
"""For how long something goes on that hits upon another moment each time."""
