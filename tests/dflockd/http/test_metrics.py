"""The metrics: what they say, that they are well-formed, and that the page about them is whole."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflockd.http import HttpOptions, HttpServer
from dflockd.server import Server, ServerOptions
from dflockd.table import Limits, LockTable, TokenIssuer
from dflockd.wire import Acquire, Enqueue, Reserve, Space, Wait
from tests.dflockd.http.http_site import SECRET, Site, StartSite, bearer
from tests.dflockd.raw_server import PATIENCE, eventually

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
LABELS = {"le", "reason", "result", "check", "stage", "generation"}
LABELS |= {"status", "condition", "setting", "version", "compiled", "python", "loop"}


def families(site: Site) -> dict[str, str]:
    """The name and type of every metric, as Prometheus' own parser reads them."""
    text = site.ask("/metrics").body
    return {family.name: family.type for family in text_string_to_metric_families(text)}


def full_site(start_site: StartSite, tmp_path: Path) -> Site:
    return start_site("--state-dir", str(tmp_path / "state"))


def test_names_and_labels_are_prometheus_own_kind(start_site: StartSite, tmp_path: Path) -> None:
    site = full_site(start_site, tmp_path)
    site.server.connect().lock("key-in-no-metric")
    answer = site.ask("/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    for family in text_string_to_metric_families(answer.body):
        assert family.name.startswith(("dflockd_", "process_", "python_gc_")), family
        assert family.documentation
        for sample in family.samples:
            assert set(sample.labels) <= LABELS, sample
    assert "key-in-no-metric" not in answer.body


def test_promtool_finds_nothing_to_say(start_site: StartSite, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on PATH (it comes with Prometheus)")
    text = full_site(start_site, tmp_path).ask("/metrics").body
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_metric_is_documented_and_no_other(start_site: StartSite, tmp_path: Path) -> None:
    made = {
        f"{name}_total" if kind == "counter" else name
        for name, kind in families(full_site(start_site, tmp_path)).items()
        if name.startswith("dflockd_")
    }
    in_a_cluster = {f"dflockd_shards{end}" for end in ("", "_recovering", "_unserved")}
    in_a_cluster |= {"dflockd_store_bytes", "dflockd_store_used_bytes", "dflockd_cluster_shards"}
    with_tls = {"dflockd_certificate_expiry_timestamp_seconds"}
    rows = re.findall(r"^\| `(dflockd_\w+)[`{]", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == made | in_a_cluster | with_tls


def test_the_journal_is_there_with_a_state_directory_alone(
    site: Site, start_site: StartSite, tmp_path: Path
) -> None:
    assert "dflockd_journal_bytes" not in families(site)
    kept = full_site(start_site, tmp_path)
    assert kept.metric("dflockd_journal_segments") == 1
    assert kept.metric("dflockd_journal_bytes") > kept.metric("dflockd_journal_live_bytes") == 0
    kept.server.connect().lock("kept")
    assert kept.metric("dflockd_journal_live_bytes") > 0


def test_the_life_of_locks_in_numbers(start_site: StartSite) -> None:
    """One lock for each way to begin and to end, and one request for each refusal."""
    site = start_site("--max-waiters", "1", "--max-locks", "5")
    one, two = site.server.connect(), site.server.connect()

    token = one.lock("released")
    assert one.ask("n", "released", f"{token} 40").startswith("ok ")
    assert one.ask("n", "released", "0" * 32) == "error"
    assert two.ask("l", "released", "0") == "timeout"
    two.request("l", "released", "30")
    eventually(lambda: site.metric("dflockd_waiters") == 1)
    assert site.server.connect().ask("l", "released", "30") == "error_max_waiters"
    assert one.ask("r", "released", token) == "ok"
    second = two.line().split(" ")[1]
    assert one.ask("l", "released", "1") == "timeout"
    assert two.ask("r", "released", second) == "ok"

    site.server.connect().ask("l", "expiring", "0 1")
    left = one.lock("lapsing")
    assert one.ask("renew", "lapsing", f"token={left} how=detach lease=1") == "ok 1"
    fence = int(one.lock("evicted")[:16], 16)
    assert two.ask("evict", "evicted", fence) == "ok"
    leaver = site.server.connect()
    leaver.lock("left")
    leaver.close()
    waiter = site.server.connect()
    one.lock("kept")
    waiter.request("l", "kept", "30")
    eventually(lambda: site.metric("dflockd_waiters") == 1)
    waiter.close()
    eventually(lambda: site.metric("dflockd_waiters") == 0)
    away = site.server.connect()
    assert away.ask("e", "kept", "30") == "queued"
    assert away.ask("wait", "kept", "timeout=0 away=0 hold=0").startswith("timeout ")

    def ended(reason: str) -> float:
        return site.metric("dflockd_holds_ended_total", reason=reason)

    eventually(lambda: ended("expiry") == ended("lapse") == ended("disconnect") == 1)
    eventually(lambda: site.metric("dflockd_waits_abandoned_total", reason="disconnect") == 1)
    assert (ended("release"), ended("eviction"), ended("superseded")) == (2, 1, 0)
    assert site.metric("dflockd_grants_total") == 7
    assert site.metric("dflockd_wait_seconds_count") == 7
    assert site.metric("dflockd_wait_seconds_bucket", le="0.001") >= 6
    assert site.metric("dflockd_hold_seconds_count") == 6
    assert site.metric("dflockd_holds") == site.metric("dflockd_keys") == 1
    assert site.metric("dflockd_waiters") == site.metric("dflockd_waits_kept_total") == 1
    assert site.metric("dflockd_waits_abandoned_total", reason="timeout") == 1
    assert site.metric("dflockd_waits_abandoned_total", reason="forgotten") == 0
    assert site.metric("dflockd_refusals_total", reason="busy") == 1
    assert site.metric("dflockd_refusals_total", reason="limit") == 1
    assert site.metric("dflockd_renewals_total", result="ok") == 1
    assert site.metric("dflockd_renewals_total", result="unknown") == 1
    assert site.metric("dflockd_renewal_lease_used_ratio_count") == 1
    assert site.metric("dflockd_renewal_lease_used_ratio_bucket", le="0.5") == 1
    assert site.metric("dflockd_keys_limit") == 5


def test_connections(start_site: StartSite, secret_file: Path) -> None:
    flags = ("--max-connections", "2", "--auth-token-file", str(secret_file))
    site = start_site(*flags, headers=bearer())
    one = site.server.connect()
    assert one.ask("auth", "_", SECRET) == "ok"
    intruder = site.server.connect()
    assert intruder.ask("auth", "_", "wrong") == "error_auth"
    assert intruder.line() == ""
    eventually(lambda: site.metric("dflockd_connections") == 1)
    assert site.metric("dflockd_auth_failures_total") == 1
    two, three = site.server.connect(), site.server.connect()
    assert two.ask("auth", "_", SECRET) == "ok"
    assert three.ask("auth", "_", SECRET) == ""
    assert site.metric("dflockd_connections_refused_total") == 1


def test_the_lag_of_the_event_loop_is_measured(site: Site) -> None:
    eventually(lambda: site.metric("dflockd_event_loop_lag_seconds_count") > 0)


async def metrics_of(http: HttpServer) -> str:
    """Return the metrics of a site in this event loop."""

    def ask() -> str:
        with urlopen(f"{http.urls[0]}metrics", timeout=PATIENCE) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(ask)


async def test_a_place_that_nobody_came_back_to_is_counted_as_an_abandoned_wait() -> None:
    table = LockTable(Limits(), TokenIssuer(b"x", 1))
    holder, away = table.connect(), table.connect()
    table.handle(holder, Acquire(Space.LOCK, b"k", 1, 0, 1000), 0)
    table.handle(away, Enqueue(Space.LOCK, b"k", 1, 5), 0)
    table.handle(away, Wait(Space.LOCK, b"k", 0, Reserve(0, 0)), 0)
    table.advance(100)
    server = Server(table, ServerOptions(host="127.0.0.1", port=0))
    await server.start()
    http = HttpServer(server, HttpOptions())
    await http.start()
    try:
        text = await metrics_of(http)
    finally:
        await http.stop()
        await server.stop()
    assert 'dflockd_waits_abandoned_total{reason="forgotten"} 1.0' in text
    assert 'dflockd_waits_abandoned_total{reason="disconnect"} 0.0' in text
    assert "dflockd_waits_kept_total 1.0" in text
    assert "dflockd_waiters 0.0" in text


async def test_two_servers_of_one_process_do_not_share_numbers() -> None:
    servers, sites = [], []
    for number in range(2):
        table = LockTable(Limits(max_locks=100 + number), TokenIssuer(b"x", 1))
        server = Server(table, ServerOptions(host="127.0.0.1", port=0))
        await server.start()
        http = HttpServer(server, HttpOptions())
        await http.start()
        servers.append(server)
        sites.append(http)
    try:
        for number, http in enumerate(sites):
            assert f"dflockd_keys_limit {100 + number}.0" in await metrics_of(http)
    finally:
        for http in sites:
            await http.stop()
        for server in servers:
            await server.stop()
