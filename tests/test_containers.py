"""The files that containers are made from agree with the code, and with each other.

What they do is shown by `make smoke`, which needs a Docker engine.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflockd import __version__
from dflockd.config import SETTINGS
from examples.demo import stage
from tests.container_files import (
    COMPOSE,
    DOCKERFILES,
    MANIFESTS,
    ROOT,
    documents,
    environments,
    nested,
)
from tests.dflockd.client_support import make_certificate

OVERRIDES = [ROOT / "tests/smoke/outcomes.yml", ROOT / "tests/smoke/cluster-outcomes.yml"]
MONITORING = sorted((ROOT / "examples/monitoring").rglob("*.yml"))
OTHER_IMAGE = re.compile(r"^\$\{([A-Z]+_IMAGE):-(.*)\}$")
BOUND = 60


def images():
    for path in [*COMPOSE, *MANIFESTS, *OVERRIDES]:
        for document in documents(path):
            for mapping in nested(document):
                if isinstance(mapping.get("image"), str):
                    # What it is if the variable is not set.
                    yield OTHER_IMAGE.sub(r"\2", mapping["image"])
    for path in DOCKERFILES:
        yield from re.findall(r"^ARG BASE=(\S+)$", path.read_text(), re.MULTILINE)
    names = re.findall(r'"((?:[a-z-]+:)[\w.-]+)"$', engine_text(), re.MULTILINE)
    assert names
    yield from names


def engine_text():
    return (ROOT / "tests/smoke/engine.py").read_text()


def test_one_image_has_one_tag():
    tags = {}
    for image in images():
        name, _, tag = image.rpartition(":")
        assert name, f"{image} has no tag"
        assert tag != "latest"
        tags.setdefault(name, set()).add(tag)

    assert {name: found for name, found in tags.items() if len(found) > 1} == {}
    assert tags["dflockd"] == {__version__}


@pytest.mark.parametrize("path", COMPOSE, ids=["alone", "cluster"])
def test_every_image_can_be_given_by_its_digest(path):
    page = (ROOT / "docs/containers.md").read_text()
    for service in documents(path)[0]["services"].values():
        image = service["build"]["args"]["BASE"] if "build" in service else service["image"]
        assert f"`{OTHER_IMAGE.fullmatch(image)[1]}`" in page


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


@pytest.mark.parametrize("path", COMPOSE, ids=["alone", "cluster"])
def test_secrets_are_made_at_the_first_start(path, tmp_path):
    document = documents(path)[0]
    services = document["services"]
    maker = services.pop("make-secrets")
    [script] = maker["command"]
    files = {
        value for service in services.values() for value in service.get("environment", {}).values()
    }
    wanted = {Path(value).name for value in files if value.startswith("/run/secrets/")}

    def made():
        run = [sys.executable, "-c", script.replace("/run/secrets", str(tmp_path))]
        subprocess.run(run, check=True, timeout=BOUND)
        return {each.name: each.read_text() for each in tmp_path.iterdir()}

    first = made()
    assert first.keys() == wanted
    assert all(re.fullmatch(r"[0-9a-f]{64}\n", text) for text in first.values())
    assert len(set(first.values())) == len(first)
    assert made() == first
    # Containers have users of their own.
    assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {0o444}
    # No file of the repository is a secret.
    assert "secrets" not in document
    for service in services.values():
        if any("/run/secrets/" in value for value in service.get("environment", {}).values()):
            assert "secrets:/run/secrets:ro" in service["volumes"]


def test_no_secret_is_known_to_everybody():
    for path in [*COMPOSE, *MANIFESTS, *MONITORING]:
        assert "replace-me" not in path.read_text()
    for path in MANIFESTS:
        for document in documents(path):
            assert document["kind"] != "Secret"
        if "secretName: dflockd" in path.read_text():
            assert "kubectl create secret generic dflockd --from-file=token=" in path.read_text()


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "server/README.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_page_starts_a_server_for_everybody(path):
    for line in re.findall(r"^ *(dflockd(?: --.*)?)$", path.read_text(), re.MULTILINE):
        assert re.search("--(host|cluster|unix-socket) ", line), line


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


@pytest.mark.parametrize(
    "case", ["plain", "token", "token file", "TLS", "client certificates", "unix"]
)
def test_the_health_check_is_answered(case, tmp_path):
    env = {}
    if case == "token":
        env["DFLOCKD_AUTH_TOKEN"] = "\udcff"  # a byte that is no text
    elif case == "token file":
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
        # Of the secret, which is an argument here.
        assert server.log_text().count("WARNING") == (case == "token")


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
