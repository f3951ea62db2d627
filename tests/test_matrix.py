"""What the matrix of versions names is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import matrix
from tests.environments import NotToBeHadError, environment


def test_each_quick_test_is_there() -> None:
    for each in matrix.QUICK:
        path, _, name = each.partition("::")
        text = (matrix.ROOT / "tests" / "celery_dflock" / path).read_text()
        assert f"def {name}(" in text if name else text


def test_what_cannot_be_had_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.environments.PLACE", tmp_path)
    with pytest.raises(NotToBeHadError) as raised:
        environment("none", ["celery"], python=str(Path("/bin/false")))
    assert len(str(raised.value).splitlines()) == 1
    assert not (tmp_path / "none" / "installed").exists()
