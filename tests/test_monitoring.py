"""What is shipped for Prometheus and Grafana: alerts that fire, and a panel for each."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
MONITORING = ROOT / "examples/monitoring"
_METRIC = re.compile(r"\b(?:dflockd|process)_\w+|\bup\b")


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def metrics_of(text: str) -> set[str]:
    return {re.sub(r"_bucket$", "", name) for name in _METRIC.findall(text)}


@pytest.mark.parametrize(
    "arguments", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")]
)
def test_each_alert_fires_and_none_where_all_is_well(arguments: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on PATH (it comes with Prometheus)")
    done = subprocess.run(
        [promtool, *arguments],
        cwd=MONITORING,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_in_the_rule_test() -> None:
    tested = (MONITORING / "alerts_test.yml").read_text()
    for rule in rules():
        assert f'alertname="{rule["alert"]}"' in tested


def test_the_page_for_the_pager_has_a_row_for_each_alert() -> None:
    page = (ROOT / "docs" / "howto" / "on-call.md").read_text()
    rows = re.findall(r"^\| `(Dflockd\w+)` \| (now|today|this week) \|", page, re.MULTILINE)

    assert sorted(name for name, _ in rows) == sorted(rule["alert"] for rule in rules())
    critical = {rule["alert"] for rule in rules() if rule["labels"]["severity"] == "critical"}
    assert critical <= {name for name, when in rows if when == "now"}


def test_the_dashboard_shows_what_each_alert_looks_at() -> None:
    dashboard = json.loads((MONITORING / "grafana/dashboards/dflockd.json").read_text())
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in metrics_of(target["expr"])
    }
    for rule in rules():
        assert metrics_of(rule["expr"]) <= shown, rule["alert"]


def test_panels_do_not_overlap() -> None:
    dashboard = json.loads((MONITORING / "grafana/dashboards/dflockd.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
