"""The unit for systemd: systemd accepts it, and what it starts grants locks and ends at SIGTERM."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import psutil
import pytest

from dflockd.config import SETTINGS
from dflockd.sync_client import DistributedLock
from examples.demo.stage import ROOT
from tests.quick_start import Typed

UNIT = ROOT / "examples" / "systemd" / "dflockd.service"
PAGE = (ROOT / "docs" / "howto" / "service.md").read_text()
PROGRAM = "/opt/dflockd/bin/dflockd"
BOUND = 60


def lines(name: str) -> list[str]:
    """What the unit says under this name, as often as it does."""
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def settings() -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines("Environment"))


def here(text: str) -> str:
    return text.replace(PROGRAM, str(Path(sys.executable).with_name("dflockd")))


def test_systemd_accepts_it(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on PATH")
    unit = tmp_path / UNIT.name
    unit.write_text(here(UNIT.read_text()))

    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)],
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_what_it_starts_serves_and_ends(tmp_path: Path) -> None:
    secret = "0123456789abcdef"
    [credential] = lines("LoadCredential")
    (tmp_path / credential.partition(":")[0]).write_text(f"{secret}\n")
    given = {name: value.replace("%d", str(tmp_path)) for name, value in settings().items()}
    given["DFLOCKD_STATE_DIR"] = str(tmp_path / "state")
    given |= {"DFLOCKD_PORT": "0", "DFLOCKD_HTTP_PORT": "0"}
    [command] = lines("ExecStart")
    with Typed(tmp_path, "dflockd", here(command), {**os.environ, **given}) as server:
        log = server.wait_log("listening on ")
        port = int(re.findall(r"listening on \S+:(\d+)", log)[0])
        with DistributedLock("a", servers=[("127.0.0.1", port)], auth_token=secret) as lock:
            assert lock.held
        process = psutil.Process(server.pid)
        process.terminate()
        assert process.wait(BOUND) == 0


def test_its_settings_exist() -> None:
    known = {setting.variable: setting for setting in SETTINGS}

    assert settings()
    for name, value in settings().items():
        known[name].kind.read(value)


def test_it_waits_longer_than_the_server_takes_to_stop() -> None:
    [allowed] = lines("TimeoutStopSec")
    [takes] = [each.default for each in SETTINGS if each.flag == "--shutdown-timeout"]

    assert float(allowed) > float(str(takes)) + 5


def test_the_page_speaks_of_what_the_unit_says() -> None:
    unit = UNIT.read_text()
    named = re.findall(r"^- \*\*`([A-Z]\w+(?:=[^`]*)?)`", PAGE, re.MULTILINE)

    assert len(named) >= 5
    assert [each for each in named if each not in unit] == []


@pytest.mark.parametrize("part", re.findall(r"^```ini\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
def test_parts_of_the_page_are_units(part: str) -> None:
    parser = ConfigParser(comment_prefixes="#", strict=False)
    parser.read_string(part)

    assert set(parser.sections()) <= {"Unit", "Service"}
