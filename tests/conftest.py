"""The containers have a suite of their own: `make smoke`."""

import pytest

collect_ignore = ["smoke"]

LONGEST = (
    "test_testing.py",
    "test_real_cluster.py",
    "test_published_clients.py",
    "test_top.py",
    "test_http_page.py",
    "test_shutdown.py",
    "test_pools.py",
    "test_consumer_wait.py",
    "test_table_model.py",
)
"""The files that take longest. Each goes to one process, in which the others then find less to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest, so that no process is left alone with one at the end."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
