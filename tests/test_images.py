"""What goes into the images: pinned, hashed, complete."""

import importlib.metadata
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.container_files import DOCKERFILES, ROOT, logical_lines, pins

PINNED = [
    "requirements-smoke.txt",
    "server/requirements.txt",
    "server/requirements-build.txt",
    "examples/requirements.txt",
]
HASHED = ["server/requirements.txt", "server/requirements-build.txt", "examples/requirements.txt"]


@pytest.mark.parametrize("name", PINNED)
def test_pins_are_those_of_the_tests(name):
    ours, others = pins("requirements-dev.txt"), pins(name)

    assert others
    assert {package: ours.get(package, pin) for package, pin in others.items()} == others


def test_the_image_pins_what_its_extras_need():
    project = tomllib.loads((ROOT / "server/pyproject.toml").read_text())["project"]
    wanted = {
        re.match(r"[\w-]+", requirement)[0]
        for extra in ("etcd", "http", "uvloop")
        for requirement in project["optional-dependencies"][extra]
    }

    assert wanted <= pins("server/requirements.txt").keys()


def test_the_image_pins_what_compiles_the_server():
    project = tomllib.loads((ROOT / "server/pyproject.toml").read_text())["tool"]["hatch"]
    hook = project["build"]["targets"]["wheel"]["hooks"]["mypyc"]
    pinned = pins("server/requirements-build.txt")

    for requirement in map(Requirement, hook["dependencies"]):
        assert requirement.specifier.contains(pinned[requirement.name]), requirement


@pytest.mark.parametrize("name", HASHED)
def test_what_the_images_install_is_pinned_and_hashed(name):
    requirement = re.compile(r"[\w.-]+==[\w.]+(?: ;[^-]+)?(?:\s+--hash=sha256:[0-9a-f]{64})+\s*")
    wrong = [line[:60] for line in logical_lines(name) if not requirement.fullmatch(line)]

    assert pins(name)
    assert wrong == []


@pytest.mark.parametrize("name", HASHED)
def test_what_the_images_install_is_made_from_what_is_wanted(name):
    source = name.removesuffix(".txt") + ".in"
    made = (ROOT / name).read_text().splitlines()[1]

    assert pins(source).items() <= pins(name).items()
    assert made.startswith(
        "#    uv pip compile --universal --python-version 3.11 --generate-hashes "
    )
    assert made.endswith(f" {source} -o {name}")


def needed(requirement, environment):
    """The distributions that a requirement brings on such a Python, by what is installed here."""
    found, pending = set(), [requirement]
    while pending:
        each = pending.pop()
        name = canonicalize_name(each.name)
        if (name, *each.extras) in found:
            continue
        found.add((name, *each.extras))
        for text in importlib.metadata.requires(name) or ():
            inner = Requirement(text)
            wanted = (
                inner.marker is None or inner.marker.evaluate({**environment, "extra": extra})
                for extra in ("", *each.extras)
            )
            if any(wanted):
                pending.append(inner)
    return {name for name, *_ in found}


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("name", ["server/requirements", "examples/requirements"])
def test_what_the_images_install_is_complete(name, python):
    environment = {
        "python_version": python,
        "python_full_version": python + ".9",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
    }
    wanted = set()
    for line in logical_lines(name + ".in"):
        wanted |= needed(Requirement(line), environment)

    assert wanted <= pins(name + ".txt").keys()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_nothing_gets_into_an_image_unchecked(path):
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    commands = [each for line in text.splitlines() for each in re.split("RUN|&&", line)]
    pip = [each for each in commands if re.search(r"\bpip .*\b(install|wheel)\b", each)]

    assert len(pip) == 4
    for each in pip:
        hashed = "install --require-hashes -r " in each
        ours = "--no-deps" in each and ("--no-index" in each or "--no-build-isolation" in each)
        assert hashed or ours, each
    # Who builds it can name the digest.
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
