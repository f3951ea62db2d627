"""The files that containers are made from agree with the code, and with each other.

What they do is shown by `make smoke`, which needs a Docker engine.
"""

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dflockd import __version__
from dflockd.config import SETTINGS
from examples.demo import stage
from tests.dflockd.client_support import make_certificate

ROOT = stage.ROOT
COMPOSE = [ROOT / "docker-compose.yml", ROOT / "examples/cluster/docker-compose.yml"]
OVERRIDES = [ROOT / "tests/smoke/outcomes.yml", ROOT / "tests/smoke/cluster-outcomes.yml"]
MANIFESTS = sorted((ROOT / "examples/kubernetes").glob("*.yaml"))
MONITORING = sorted((ROOT / "examples/monitoring").rglob("*.yml"))
PINNED = ["requirements-smoke.txt", "server/requirements.txt", "examples/requirements.txt"]
HASHED = [
    "server/requirements.txt",
    "server/requirements-build.txt",
    "examples/requirements.txt",
]
DOCKERFILES = sorted(ROOT.glob("*/Dockerfile"))
BOUND = 60


def pins(name):
    lines = [re.split("[;#]| --hash=", line)[0] for line in logical_lines(name)]
    found = (re.match(r"([\w-]+)(?:\[.*\])?==(\S+)\s*$", line) for line in lines if line.strip())
    return {match[1].lower().replace("_", "-"): match[2] for match in found}


def logical_lines(name):
    """The lines of a file of requirements, joined where they go on, without comments."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def nested(value):
    """Every mapping in a document."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from nested(inner)


def environments(path):
    """Every variable that a file gives to a container."""
    for document in documents(path):
        for mapping in nested(document):
            if isinstance(mapping.get("environment"), dict):
                yield from mapping["environment"].items()
            for variable in mapping.get("env", []):
                yield variable["name"], variable.get("value", "")


def images():
    for path in [*COMPOSE, *MANIFESTS, *OVERRIDES]:
        for document in documents(path):
            for mapping in nested(document):
                if isinstance(mapping.get("image"), str):
                    yield mapping["image"]
    for path in DOCKERFILES:
        yield from re.findall(r"^ARG BASE=(\S+)$", path.read_text(), re.MULTILINE)
    names = re.findall(r'"((?:[a-z-]+:)[\w.-]+)"$', engine_text(), re.MULTILINE)
    assert names
    yield from names


def engine_text():
    return (ROOT / "tests/smoke/engine.py").read_text()


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


def test_one_image_has_one_tag():
    tags = {}
    for image in images():
        name, _, tag = image.rpartition(":")
        assert name, f"{image} has no tag"
        assert tag != "latest"
        tags.setdefault(name, set()).add(tag)

    assert {name: found for name, found in tags.items() if len(found) > 1} == {}
    assert tags["dflockd"] == {__version__}


@pytest.mark.parametrize(
    "path", [*COMPOSE, *MANIFESTS], ids=lambda path: str(path.relative_to(ROOT))
)
def test_settings_exist_and_their_values_are_such(path):
    known = {setting.variable: setting for setting in SETTINGS}
    found = 0
    for name, value in environments(path):
        if name.startswith("DFLOCKD_"):
            assert name in known
            if "$" not in value:
                known[name].kind.read(value)
            found += 1

    assert found


@pytest.mark.parametrize(
    "path", [*COMPOSE, *MANIFESTS, *OVERRIDES], ids=lambda path: str(path.relative_to(ROOT))
)
def test_secrets_are_files(path):
    for name, value in environments(path):
        if re.search("TOKEN|PASSWORD|SECRET", name):
            assert name.endswith("_FILE")
            assert value.startswith("/run/secrets/")


def test_no_container_of_ours_may_do_more_than_it_needs():
    for path in COMPOSE:
        for service in documents(path)[0]["services"].values():
            if service["image"].startswith(("dflockd:", "celery-dflock-example:")):
                assert service["read_only"] is True
                assert service["cap_drop"] == ["ALL"]
                assert service["security_opt"] == ["no-new-privileges:true"]


def test_ports_are_published_on_loopback_only():
    for path in COMPOSE:
        for service in documents(path)[0]["services"].values():
            for port in service.get("ports", []):
                assert port.startswith("127.0.0.1:")


def test_what_is_watched_is_measured():
    page = (ROOT / "docs/metrics.md").read_text()
    known = set(re.findall(r"`(dflockd_\w+)", page)) | {"dflockd_ready"}
    histograms = {name + "_bucket" for name in known}
    dashboard = ROOT / "examples/monitoring/grafana/dashboards/dflockd.json"
    panels = json.loads(dashboard.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    rules = documents(ROOT / "examples/monitoring/alerts.yml")[0]["groups"][0]["rules"]
    expressions += [rule["expr"] for rule in rules]

    used = {name for text in expressions for name in re.findall(r"\bdflockd_\w+", text)}

    assert len(used) > 10
    assert used <= known | histograms


@pytest.mark.parametrize("path", MONITORING, ids=lambda path: path.name)
def test_the_files_for_monitoring_can_be_read(path):
    assert documents(path)


def compose_command():
    if shutil.which("docker"):
        done = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if done.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


@pytest.mark.parametrize(
    "files",
    [[COMPOSE[0]], [COMPOSE[1]], [COMPOSE[0], OVERRIDES[0]], [COMPOSE[1], OVERRIDES[1]]],
    ids=["alone", "cluster", "outcomes", "cluster outcomes"],
)
def test_docker_compose_takes_the_files(files):
    words = compose_command()
    if words is None:
        pytest.skip("docker compose is not installed")
    for path in files:
        words = [*words, "-f", str(path)]
    done = subprocess.run(
        [*words, "--profile", "monitoring", "config", "--quiet"],
        env={**os.environ, "OUTCOMES_DIRECTORY": "/tmp", "OUTCOMES_LEASE": "5"},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=BOUND,
    )

    assert (done.returncode, done.stderr) == (0, "")


def health(**env):
    return subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "server/healthcheck.py")],
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=BOUND,
    )


@pytest.mark.parametrize("case", ["plain", "token file", "TLS", "client certificates", "unix"])
def test_the_health_check_is_answered(case, tmp_path):
    env = {}
    if case == "token file":
        (tmp_path / "token").write_text("sesame\n")
        env["DFLOCKD_AUTH_TOKEN_FILE"] = str(tmp_path / "token")
    elif case in ("TLS", "client certificates"):
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not on PATH")
        cert, key = make_certificate(tmp_path)
        env["DFLOCKD_TLS_CERT"], env["DFLOCKD_TLS_KEY"] = str(cert), str(key)
        if case == "client certificates":
            env["DFLOCKD_TLS_CLIENT_CA"] = str(cert)
    elif case == "unix":
        env["DFLOCKD_UNIX_SOCKET"] = str(Path(os.path.relpath(tmp_path)) / "socket")
    flags = [
        word
        for name, value in env.items()
        for word in ("--" + name.removeprefix("DFLOCKD_").lower().replace("_", "-"), value)
    ]
    with stage.LockServer(tmp_path, *flags) as server:
        done = health(DFLOCKD_HOST="127.0.0.1", DFLOCKD_PORT=str(server.port), **env)

        assert done.returncode == 0, done.stderr
        assert "WARNING" not in server.log_text()


def test_the_health_check_notices_silence_and_absence(tmp_path):
    with stage.LockServer(tmp_path) as server:
        env = {"DFLOCKD_HOST": "127.0.0.1", "DFLOCKD_PORT": str(server.port)}
        os.kill(server.pid, signal.SIGSTOP)
        silent = health(**env)
        os.kill(server.pid, signal.SIGCONT)
        well = health(**env)
    absent = health(**env)

    assert [silent.returncode, well.returncode, absent.returncode] == [1, 0, 1]
    assert "the lock server does not answer: timed out" in silent.stderr
    assert "refused" in absent.stderr
