"""What the matrix of versions names is there, and begins with the oldest that is promised."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests import matrix
from tests.environments import NotToBeHadError, environment


def test_each_quick_test_is_there() -> None:
    for each in matrix.QUICK:
        path, _, name = each.partition("::")
        text = (matrix.ROOT / "tests" / "celery_dflock" / path).read_text()
        assert f"def {name}(" in text if name else text


def test_it_has_the_oldest_celery_and_each_python() -> None:
    project = tomllib.loads((matrix.ROOT / "pyproject.toml").read_text())["project"]
    (celery,) = (each for each in project["dependencies"] if each.startswith("celery"))
    assert any(
        each.requirements[0] == f"{celery.replace('>=', '==')}.0" for each in matrix.VERSIONS
    )
    named = {each.rpartition(" ")[2] for each in project["classifiers"] if ":: 3." in each}
    assert named <= set(matrix.PYTHONS)


def test_what_cannot_be_had_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.environments.PLACE", tmp_path)
    with pytest.raises(NotToBeHadError) as raised:
        environment("none", ["celery"], python=str(Path("/bin/false")))
    assert len(str(raised.value).splitlines()) == 1
    assert not (tmp_path / "none" / "installed").exists()
