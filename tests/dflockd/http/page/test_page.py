"""The page in a real browser: it shows what real workers do, and does what it is told."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dflockd.shards import get_shard_id
from dflockd.wire import MAX_LIMIT
from examples.demo.stage import LockServer, Redis, Worker
from tests.dflockd.cluster.stage import ClusterStage
from tests.dflockd.http.http_site import SECRET, Site, StartSite, named
from tests.dflockd.http.page.page_support import OpenPage, apart, lock_many, row_of
from tests.dflockd.ports import free_port
from tests.dflockd.raw_server import PATIENCE, ServerProcess, eventually
from tests.dflockd.shards.etcd_process import Etcd

pytest.importorskip("playwright.sync_api", reason="no playwright: no browser test")

from playwright.sync_api import Locator, expect


def seconds_left(row: Locator) -> float:
    return float(row.locator(".lease span").inner_text().removesuffix(" s"))


@pytest.mark.usefixtures("needs_redis")
def test_a_lock_appears_is_renewed_changes_hands_and_goes(
    start_site: StartSite, open_page: OpenPage, tmp_path: Path
) -> None:
    from tests.dflockd.http.shown_tasks import sync

    site = start_site()
    page = open_page(site)
    expect(page.locator("#empty > p")).to_have_text("Nothing is held, and nobody waits.")
    gates = [tmp_path / "first", tmp_path / "second"]
    with Redis(tmp_path) as redis:
        env = {"SHOWN_BROKER_URL": redis.url, "DFLOCK_SERVERS": f"127.0.0.1:{site.server.port}"}
        with Worker(tmp_path, app="tests.dflockd.http.shown_tasks", env=env) as worker:
            worker.wait_ready()
            with sync.app.connection_for_write(redis.url) as connection:
                ids = []
                for gate in gates:
                    sent = sync.apply_async(
                        ("account:7", str(gate)), connection=connection, ignore_result=True
                    )
                    ids.append(sent.id)
                    # Else the second could be the first.
                    holders = len(ids)
                    eventually(
                        lambda holders=holders: (
                            sum(  # type: ignore[misc]
                                site.json("/api/stats")[name] for name in ("holds", "waiters")
                            )
                            == holders
                        )
                    )

            row = row_of(page, "account:7")
            expect(row.locator(".who b")).to_have_text("shop.sync")
            expect(row.locator(".who small").first).to_have_text(
                re.compile(rf"{ids[0][:8]} · {re.escape(socket.gethostname())} · pid \d+")
            )
            expect(row.locator(".waiting")).to_have_text("1")
            expect(page.locator("#holds")).to_have_text("1")

            row.locator(".toggle").click()
            waiter = page.locator("tr.detail ol li")
            expect(waiter).to_have_count(1)
            expect(waiter).to_contain_text(ids[1])

            # The lease drains, and a renewal fills it again.
            drained = seconds_left(row)
            eventually(lambda: seconds_left(row) < 1.5 or seconds_left(row) < drained)
            low = seconds_left(row)
            eventually(lambda: seconds_left(row) > low)

            gates[0].touch()
            expect(row.locator(".who small").first).to_contain_text(ids[1][:8])
            expect(row.locator(".waiting")).to_have_text("0")
            expect(page.locator("tr.detail ul li")).to_contain_text(ids[1])

            gates[1].touch()
            expect(row).to_have_count(0)
            expect(page.locator("#empty")).to_be_visible()


@pytest.mark.parametrize(
    "key",
    [
        "<img/src=x/onerror=document.title='pwned'>",
        "</code><script>document.title='pwned'</script>",
        "..",
        "a/b?c=d&e#f%2F",
    ],
)
def test_a_key_is_text_whatever_it_says(site: Site, open_page: OpenPage, key: str) -> None:
    named(site, f"{key} <b onclick='x'>bold</b>").lock(key)
    page = open_page(site)
    row = row_of(page, key)
    expect(row.locator(".who b")).to_have_text(f"{key} <b onclick='x'>bold</b>")
    row.locator(".toggle").click()
    expect(page.locator("tr.detail ul li")).to_contain_text("fence ")
    assert "pwned" not in page.title()
    assert page.locator("main img, main script, main b b").count() == 0


def test_an_operator_releases_a_lock(closed_site: Site, open_page: OpenPage) -> None:
    stuck, following = named(closed_site, "stuck"), named(closed_site, "next")
    token = stuck.lock("page:stuck")
    following.request("l", "page:stuck", "60")
    page = open_page(closed_site, http_credentials={"username": "ann", "password": SECRET})
    row_of(page, "page:stuck").locator(".toggle").click()

    page.get_by_role("button", name="Release…").click()
    expect(page.locator("#confirm")).to_contain_text("page:stuck")
    page.get_by_role("button", name="Keep it").click()
    assert stuck.ask("n", "page:stuck", token).startswith("ok ")
    page.get_by_role("button", name="Release…").click()
    page.get_by_role("button", name="Release", exact=True).click()

    expect(row_of(page, "page:stuck").locator(".who b")).to_have_text("next")
    assert following.line().startswith("ok ")
    closed_site.server.wait_for_log("'ann' at 127.0.0.1 evicts the holder of 'page:stuck'")


def test_an_operator_pauses_a_key_and_resumes_it(closed_site: Site, open_page: OpenPage) -> None:
    holder, following = named(closed_site, "holder"), named(closed_site, "next")
    token = holder.lock("page:paused")
    following.request("l", "page:paused", "60")
    page = open_page(closed_site, http_credentials={"username": "ann", "password": SECRET})
    row = row_of(page, "page:paused")
    row.locator(".toggle").click()

    page.get_by_role("button", name="Pause…").click()
    expect(page.locator("#pausing")).to_contain_text("page:paused")
    page.get_by_label("Minutes").fill("60")
    page.get_by_label("Reason").fill("the <b>vendor</b> is down")
    page.get_by_role("button", name="Pause", exact=True).click()

    expect(page.locator("tr.detail .pause")).to_contain_text("Paused by 'ann' at 127.0.0.1 for ")
    expect(page.locator("tr.detail .pause")).to_contain_text(" left: the <b>vendor</b> is down")
    expect(row.locator(".chip")).to_have_text("paused")
    assert holder.ask("r", "page:paused", token) == "ok"
    expect(row.locator(".who")).to_contain_text("it is paused")
    page.get_by_role("button", name="Resume").click()
    expect(row.locator(".who b")).to_have_text("next")
    assert following.line().startswith("ok ")


def test_weights_and_what_is_used(site: Site, open_page: OpenPage) -> None:
    three = named(site, "three", limit=8, weight=3)
    three.lock("page:gpu")
    named(site, "two", limit=8, weight=2).lock("page:gpu")
    named(site, "all", limit=8, weight=MAX_LIMIT).request("l", "page:gpu", "60")
    page = open_page(site)
    row = row_of(page, "page:gpu")
    expect(row.locator(".chip")).to_have_text("5 of 8")
    expect(row.locator(".waiting")).to_have_text("1")
    row.locator(".toggle").click()
    holders = page.locator("tr.detail ul li")
    expect(holders.nth(0)).to_contain_text("weight 3")
    expect(holders.nth(1)).to_contain_text("weight 2")
    expect(page.locator("tr.detail ol li")).to_contain_text("weight all")
    three.close()
    expect(row.locator(".chip")).to_have_text("2 of 8")


def test_on_a_server_without_a_token_there_is_no_button(site: Site, open_page: OpenPage) -> None:
    site.server.connect().lock("no:button")
    page = open_page(site)
    row_of(page, "no:button").locator(".toggle").click()
    expect(page.locator("tr.detail ul li")).to_have_count(1)
    expect(page.get_by_role("button", name="Release…")).to_have_count(0)
    expect(page.get_by_role("button", name="Pause…")).to_have_count(0)


def test_many_keys_search_order_and_the_keyboard(
    start_site: StartSite, open_page: OpenPage
) -> None:
    site = start_site("--max-locks", "2000")
    lock_many(site, "many", 1000)
    page = open_page(site)
    expect(page.locator("#count")).to_have_text("100 of 1,000 keys")
    expect(page.locator("tr.key")).to_have_count(100)
    page.locator("#more").click()
    expect(page.locator("tr.key")).to_have_count(200)

    page.keyboard.press("/")
    page.keyboard.type("MANY:099")
    expect(page.locator("#count")).to_have_text("10 keys")
    expect(page.locator("tr.key")).to_have_count(10)
    assert "search=MANY" in page.url
    page.keyboard.press("ArrowDown")
    expect(page.locator(".toggle").first).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("tr.detail")).to_have_count(1)
    expect(page.locator(".toggle").nth(1)).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    expect(page.locator("tr.detail")).to_have_count(0)

    page.locator("#search").fill("no such key")
    expect(page.locator("#empty > p")).to_have_text(
        "Nobody holds or waits for anything with “no such key” in it."
    )
    page.locator("#search").fill("")
    page.locator("#sort").select_option("key")
    expect(page.locator("tr.key code").first).to_have_text("many:0000")
    page.reload()
    expect(page.locator("#sort")).to_have_value("key")


def test_the_page_says_when_the_server_is_gone_and_goes_on_when_it_is_back(
    start_site: StartSite, open_page: OpenPage
) -> None:
    site = start_site()
    site.server.connect().lock("before")
    page = open_page(site)
    expect(row_of(page, "before")).to_have_count(1)

    open_page.to_be_expected += ["ERR_CONNECTION", "Failed to fetch"]  # type: ignore[attr-defined]
    site.server.process.kill()
    site.server.wait()

    expect(page.locator("#notice")).to_contain_text("The server does not answer.")
    expect(page.locator("#state")).to_have_attribute("data-state", "away")
    expect(page.locator("#totals")).to_have_class(re.compile("stale"))
    port = site.url.rstrip("/").rpartition(":")[2]
    again: ServerProcess = start_site("--http-port", port).server
    again.connect().lock("after")
    expect(row_of(page, "after")).to_have_count(1)
    expect(page.locator("#notice")).to_be_hidden()


def test_a_cluster_and_a_key_whose_shard_moves_away(
    open_page: OpenPage, beneath: contextlib.ExitStack, tmp_path: Path
) -> None:
    flags = ("--http-port", "0", "--default-lease-ttl", "30")
    etcd = beneath.enter_context(Etcd(tmp_path))
    cluster = beneath.enter_context(
        ClusterStage(tmp_path, etcd, *flags, number=2, serving_lease=2, max_lease=30)
    )
    apart(cluster.wait_settled)
    one, two = cluster.servers
    key = apart(cluster.key_at, one)
    cluster.connect(one).lock(key)
    url = one.wait_log("live page: ").rpartition("live page: ")[2].strip()
    page = open_page(url)
    expect(page.locator("#shards-text")).to_contain_text("8,192 on 2 servers")
    expect(page.locator("#owners li")).to_have_count(2)
    expect(page.locator("#owners li", has_text="this server")).to_contain_text(one.address)
    row_of(page, key).locator(".toggle").click()
    expect(page.locator("tr.detail ul li")).to_have_count(1)

    open_page.to_be_expected.append("404")  # type: ignore[attr-defined]
    apart(cluster.move, [get_shard_id(key)], two)

    expect(row_of(page, key)).to_have_count(0)
    expect(page.locator("#notice")).to_be_hidden()


def test_a_server_that_does_not_find_itself_is_ready_and_says_so(
    open_page: OpenPage, beneath: contextlib.ExitStack, tmp_path: Path
) -> None:
    etcd = beneath.enter_context(Etcd(tmp_path))
    cluster = ClusterStage(tmp_path, etcd, number=0, serving_lease=2, max_lease=3)
    flags = ["--http-port", "0", "--default-lease-ttl", "3", "--advertise-check", "warn"]
    advertised = f"127.0.0.1:{free_port()}"
    flags += ["--advertise", advertised]
    server = beneath.enter_context(LockServer(tmp_path, *cluster.arguments(), *flags))
    server.wait_log(f"{advertised} is in the cluster")
    page = open_page(server.wait_log("live page: ").rpartition("live page: ")[2].strip())
    expect(page.locator("#state[data-state=ready]")).to_contain_text(
        "granting locks; advertised: --advertise does not lead here: the connection is refused"
    )


def test_a_waiter_is_found_by_its_id(site: Site, open_page: OpenPage) -> None:
    named(site, "shop.sync[11-aaaa] w1 pid 1").lock("found:here")
    waiting = []
    for number in range(3):
        waiter = named(site, f"shop.sync[{number}b-{number}bbbbbbb] w2 pid {number}")
        waiter.request("l", "found:here", "60")
        waiting.append(waiter)
        eventually(
            lambda number=number: site.json("/api/locks/found:here")["waiters"][number:] != []  # type: ignore[misc]
        )
    page = open_page(site)
    page.keyboard.press("/")
    page.keyboard.type("1B-1BBB")
    expect(page.locator("tr.key")).to_have_count(1)
    expect(row_of(page, "found:here").locator(".found")).to_contain_text(
        re.compile(r"shop\.sync 1b-1bbbb waits 2 of 3, for \d+ s")
    )
    page.locator("#search").fill("11-aaaa")
    expect(row_of(page, "found:here").locator(".found")).to_be_hidden()
    page.locator("#search").fill("")
    page.locator("#sort").select_option("wait")
    expect(page.locator("tr.key code").first).to_have_text("found:here")
    expect(row_of(page, "found:here").locator(".oldest")).to_have_text(re.compile(r"\d+ s"))


def test_groups_and_who_is_superseded_are_shown(site: Site, open_page: OpenPage) -> None:
    for number, group in enumerate(("tenant:1", "tenant:\u202e2")):
        who = {"owner": f"run-{number}", "age": number + 1, "group": group}
        named(site, f"client {number}", **who).request("l", "grouped", "60")
        eventually(lambda: site.json("/api/locks/grouped")["holders"] != [])
    page = open_page(site)
    row_of(page, "grouped").locator(".toggle").click()
    expect(page.locator("tr.detail ul li")).to_contain_text(
        "group tenant:1 · superseded by client 1 · fence "
    )
    expect(page.locator("tr.detail ol li")).to_contain_text("group tenant:\\u{202e}2")
    expect(page.locator("tr.detail")).to_contain_text("Waiting, groups take turns: 1")


def test_a_release_says_who_it_ends_and_who_is_next(closed_site: Site, open_page: OpenPage) -> None:
    stuck, following = (
        named(closed_site, "shop.sync[11-aaaa] w1 pid 7"),
        named(closed_site, "shop.sync[22-bbbb] w2 pid 8"),
    )
    stuck.lock("page:told")
    page = open_page(closed_site, http_credentials={"username": "ann", "password": SECRET})
    row_of(page, "page:told").locator(".toggle").click()
    expect(page.get_by_role("button", name="Release…")).to_have_count(1)
    following.request("l", "page:told", "60")
    expect(page.locator("tr.detail ol li")).to_have_count(1)
    page.get_by_role("button", name="Release…").click()
    for part, text in (
        ("who", "shop.sync"),
        ("id", "11-aaaa"),
        ("where", "w1 · pid 7"),
        ("age", re.compile(r"\d+ s")),
        ("next", "shop.sync · 22-bbbb · w2 · pid 8"),
    ):
        expect(page.locator(f"#confirm-{part}")).to_have_text(text)
    page.get_by_role("button", name="Release", exact=True).click()
    expect(page.locator("#done")).to_have_text(
        "page:told is released; next: shop.sync · 22-bbbb · w2 · pid 8."
    )
    following.close()


def test_pages_beyond_what_one_answer_has(start_site: StartSite, open_page: OpenPage) -> None:
    site = start_site("--max-locks", "2000", "--max-holds", "2000")
    lock_many(site, "page", 1200)
    page = open_page(site)
    page.locator("#sort").select_option("key")
    expect(page.locator("#count")).to_have_text("100 of 1,200 keys")
    for shown in (200, 300, 400, 500):
        page.locator("#more").click()
        expect(page.locator("#count")).to_have_text(f"{shown} of 1,200 keys")
    page.locator("#next").click()
    expect(page.locator("#count")).to_have_text("501 to 1,000 of 1,200 keys")
    expect(page.locator("tr.key code").first).to_have_text("page:0500")
    page.keyboard.press("n")
    expect(page.locator("#count")).to_have_text("1,001 to 1,200 of 1,200 keys")
    expect(page.locator("#next")).to_be_hidden()
    page.keyboard.press("p")
    expect(page.locator("tr.key code").first).to_have_text("page:0500")


def test_notes_are_shown_if_wanted(start_site: StartSite, open_page: OpenPage) -> None:
    site = start_site()
    for key in ("work", "celery-done:task"):
        site.server.connect().lock(key)
    page = open_page(site)
    expect(page.locator("tr.key")).to_have_count(1)
    expect(page.locator("#all-label")).to_have_text("1 notes")
    page.locator("#all").check()
    expect(page.locator("tr.key")).to_have_count(2)


def test_a_circle_is_named(start_site: StartSite, open_page: OpenPage) -> None:
    site = start_site()
    for run, key, waits in (
        ("a", "one", False),
        ("b", "two", False),
        ("a", "two", True),
        ("b", "one", True),
    ):
        client = named(site, f"move[{run}] w1 pid 1")
        if waits:
            client.request("l", key, "60")
        else:
            client.lock(key)
    page = open_page(site)
    expect(page.locator("#circles li")).to_contain_text("Deadlock, which only a timeout")
    expect(page.locator("#circles li")).to_contain_text("move[a] waits for two, held by move[b]")


def test_what_to_do_first_and_the_keys(start_site: StartSite, open_page: OpenPage) -> None:
    site = start_site()
    page = open_page(site)
    lines = page.locator("#start pre").inner_text()
    assert f'servers=["127.0.0.1:{site.server.port}"]' in lines
    done = subprocess.run(
        [sys.executable, "-c", lines],
        input="\n",
        text=True,
        timeout=PATIENCE,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page.keyboard.press("?")
    expect(page.locator("#keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#keyboard")).to_be_hidden()
