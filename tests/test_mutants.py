"""What the mutation tests try is there."""

from __future__ import annotations

import pytest

from tests import mutants


@pytest.mark.parametrize("room", mutants.ROOMS.values(), ids=list(mutants.ROOMS))
def test_a_room_has_files_and_tests(room: mutants.Room) -> None:
    package = mutants.PACKAGES[room.package]
    assert all(list(package.glob(each)) for each in room.files)
    assert all(mutants.found((each,)) for each in (*room.tests, *room.then))
