"""What one test leaves behind for those that run after it in the same process."""

from __future__ import annotations

import pytest
from celery import Celery

from tests.conftest import take_shared_tasks


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_shared_task_is_found_and_taken_away(is_shared: bool) -> None:
    Celery("isolated", set_as_current=False).task(shared=is_shared)(lambda: None)

    assert len(take_shared_tasks()) == is_shared
    assert take_shared_tasks() == []
