"""Whether it lives, and whether it grants: what orchestrators ask."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.dflockd.http.http_site import Site, StartSite
from tests.dflockd.raw_server import eventually
from tests.dflockd.storage.machine import rewrite


def checks(site: Site) -> dict[str, tuple[bool, str]]:
    answer = site.ask("/readyz")
    assert answer.status == (200 if answer.json["ready"] else 503)
    found = {check["name"]: (check["ok"], check["reason"]) for check in answer.json["checks"]}
    assert answer.json["ready"] == all(ok for ok, _ in found.values())
    assert all(reason and "\n" not in reason for _, reason in found.values())
    return found


def test_a_server_that_grants_is_ready(site: Site) -> None:
    assert site.ask("/healthz").body == "ok\n"
    assert {name for name, (ok, _) in checks(site).items() if ok} == {
        "listening",
        "not_draining",
        "not_recovering",
    }
    assert site.metric("dflockd_ready") == 1
    assert site.metric("dflockd_check", check="not_draining") == 1


def test_a_server_that_drains_lives_and_is_not_ready(start_site: StartSite) -> None:
    site = start_site("--shutdown-timeout", "10")
    holder = site.server.connect()
    token = holder.lock("held")

    site.server.signal(signal.SIGTERM)

    site.server.wait_for_log("draining: waiting for 1 connections")
    assert site.ask("/healthz").status == 200
    found = checks(site)
    assert not found["not_draining"][0]
    assert not found["listening"][0]
    assert site.metric("dflockd_ready") == 0
    assert holder.ask("r", "held", token) == "ok"
    assert site.server.wait() == 0


def test_a_server_that_recovers_is_not_ready_until_it_has(
    start_site: StartSite, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    flags = ("--state-dir", str(state), "--default-lease-ttl", "1")
    first = start_site(*flags)
    first.server.connect().lock("held")
    first.server.process.kill()
    first.server.wait()
    # As after the end of the machine: what was held may not be all that is written.
    rewrite(state, boot="another")

    site = start_site(*flags)

    ok, reason = checks(site)["not_recovering"]
    assert not ok
    assert reason.startswith("no grants for another ")
    assert site.metric("dflockd_check", check="not_recovering") == 0
    eventually(lambda: site.ask("/readyz").status == 200)
    assert site.server.connect().lock("another")
