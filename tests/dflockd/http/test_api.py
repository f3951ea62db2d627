"""Who holds what and who waits, as JSON; and the release of a lock by an operator."""

from __future__ import annotations

import json
import signal
from urllib.parse import quote, urlencode

import pytest

import dflockd
from tests.dflockd.http.http_site import SECRET, Answer, Site, StartSite, basic, bearer, named
from tests.dflockd.raw_server import eventually

HOSTILE = [
    "..",
    ".",
    "a/b",
    "a%2Fb",
    "../../etc/passwd",
    "?key=x&space=lock",
    "#",
    "<script>alert(1)</script>",
    "'\"&lt;",
    "\N{LOCK}\N{RIGHT-TO-LEFT OVERRIDE}",
    "x" * 256,
]


def waiting(site: Site, key: str, number: int) -> bool:
    return len(site.lock(key)["waiters"]) == number


def test_a_lock_with_its_holder_and_its_queue(site: Site) -> None:
    holder = named(site, "tasks.sync[1] host pid 7")
    token = holder.lock("queue", "0 20")
    for number in (1, 2):
        named(site, f"waiter {number}").request("l", "queue", "30")
        eventually(lambda number=number: waiting(site, "queue", number))  # type: ignore[misc]

    shown = site.lock("queue")

    assert (shown["key"], shown["space"], shown["limit"]) == ("queue", "lock", 1)
    (held,) = shown["holders"]
    assert held["label"] == "tasks.sync[1] host pid 7"
    assert held["fence"] == str(int(token[:16], 16)), "text, or browsers would round it"
    assert 0 <= held["held_s"] < 15
    assert held["lease_s"] == 20
    assert 19 - held["held_s"] < held["lease_left_s"] <= 20
    assert [waiter["label"] for waiter in shown["waiters"]] == ["waiter 1", "waiter 2"]
    assert shown["waiters"][0]["waited_s"] >= shown["waiters"][1]["waited_s"] >= 0
    (row,) = site.json("/api/locks", search="QUEUE")["locks"]
    assert (row["key"], row["holders"], row["waiters"]) == ("queue", 1, 2)
    assert row["holder"]["fence"] == held["fence"]


def test_whose_run_it_is_and_whose_turn(site: Site) -> None:
    first = named(site, "holder", owner="run-7", attempt=2)
    second, asking = (named(site, "waiter", owner="run-8", turn=20_000) for _ in range(2))
    for client in (second, asking):
        assert client.ask("hello", "here", "version=1").startswith("hello ok")
    asking.request("next", "_", "_")
    token = first.lock("whose", "0 20")
    assert second.ask("e", "whose", "20").startswith("queued ")
    shown = site.lock("whose")
    assert [(held["owner"], held["attempt"]) for held in shown["holders"]] == [("run-7", 2)]
    (waiter,) = shown["waiters"]
    fields = ("owner", "attempt", "told", "away")
    assert [waiter[field] for field in fields] == ["run-8", 0, False, False]
    assert first.ask("r", "whose", token) == "ok"
    (waiter,) = site.lock("whose")["waiters"]
    assert [waiter[field] for field in fields] == ["run-8", 0, True, False]
    (row,) = site.json("/api/locks", search="whose")["locks"]
    assert (row["holders"], row["waiters"], row["told"], row["holder"]) == (0, 1, 1, None)


def test_to_which_group_somebody_belongs_and_who_was_superseded(site: Site) -> None:
    plain = named(site, "three")
    for label, group in (("one", "tenant:1"), ("two", "tenant:2")):
        named(site, label, group=group).request("l", "grouped", "30")
        eventually(lambda: site.lock("grouped")["holders"])
    eventually(lambda: waiting(site, "grouped", 1))
    plain.request("l", "grouped", "30")
    eventually(lambda: waiting(site, "grouped", 2))
    shown = site.lock("grouped")
    said = [(each["group"], each["details"]) for each in shown["holders"] + shown["waiters"]]
    assert said == [("tenant:1", ["group tenant:1"]), ("tenant:2", ["group tenant:2"]), ("", [])]

    for age, label in enumerate(("older", "newer"), 1):
        named(site, label, owner=f"run-{age}", age=age).request("l", "newest", "30")
        eventually(lambda: site.lock("newest")["holders"])
    eventually(lambda: waiting(site, "newest", 1))
    [held] = site.lock("newest")["holders"]
    assert (held["superseded_by"], held["details"]) == ("newer", ["superseded by newer"])


def test_a_renewal_shows_as_a_fuller_lease(site: Site) -> None:
    holder = site.server.connect()
    token = holder.lock("renewed", "0 5")
    before = site.lock("renewed")["holders"][0]["lease_left_s"]
    assert holder.ask("n", "renewed", f"{token} 60") == "ok 60"
    after = site.lock("renewed")["holders"][0]
    assert before <= 5 < 50 < after["lease_left_s"] <= 60 == after["lease_s"]


def test_a_semaphore_is_not_the_lock_of_its_name(site: Site) -> None:
    client = site.server.connect()
    client.lock("both")
    for _ in range(2):
        assert site.server.connect().ask("sl", "both", "0 3").startswith("ok ")
    assert len(site.lock("both")["holders"]) == 1
    semaphore = site.lock("both", space="semaphore")
    assert (semaphore["limit"], len(semaphore["holders"])) == (3, 2)
    found = site.json("/api/locks", search="both", sort="key")["locks"]
    assert [(row["space"], row["holders"], row["limit"]) for row in found] == [
        ("lock", 1, 1),
        ("semaphore", 2, 3),
    ]


def test_a_lock_shows_the_limit_of_its_latest_request(site: Site) -> None:
    for limit in (1, 3):
        client = named(site, f"wants {limit}", limit=limit)
        client.lock("slots")
    assert (site.lock("slots")["limit"], len(site.lock("slots")["holders"])) == (3, 2)
    assert site.lock("slots", space="semaphore")["holders"] == []
    [row] = site.json("/api/locks", search="slots")["locks"]
    assert (row["space"], row["holders"], row["limit"]) == ("lock", 2, 3)


@pytest.mark.parametrize("key", HOSTILE)
def test_any_key_can_be_asked_for(site: Site, key: str) -> None:
    label = key if key.isprintable() else "<b>"
    named(site, label).lock(key)
    assert site.json("/api/lock", key=key)["key"] == key
    (held,) = site.lock(key)["holders"]
    assert held["label"] == label
    found = site.json("/api/locks", search=key, limit=500)["locks"]
    assert key in [row["key"] for row in found]


def test_what_nobody_holds(site: Site) -> None:
    assert site.lock("nobody") == {
        "key": "nobody",
        "space": "lock",
        "limit": None,
        "rate": None,
        "holders": [],
        "waiters": [],
        "omitted_holders": 0,
        "omitted_waiters": 0,
        "pace_s": None,
        "paused": None,
    }


def test_order_search_and_paging(start_site: StartSite) -> None:
    site = start_site("--max-locks", "2000")
    client = site.server.connect()
    names = [f"many:{number:04}" for number in range(700)]
    for name in names:
        client.lock(name, "0 100")
    waiter = site.server.connect()
    waiter.request("l", "many:0500", "30")
    eventually(lambda: waiting(site, "many:0500", 1))
    named(site, "by a Task of its own").lock("last")

    def keys(**query: object) -> list[str]:
        return [row["key"] for row in site.json("/api/locks", **query)["locks"]]

    whole = site.json("/api/locks", sort="key", limit=3)
    assert (whole["total"], whole["matched"], len(whole["locks"])) == (701, 701, 3)
    assert keys(sort="key", limit=500) == ["last", *names[:499]]
    assert keys(sort="key", limit=500, offset=500) == names[499:]
    assert keys(sort="age", limit=2) == names[:2]
    assert keys(limit=2) == ["many:0500", "many:0000"], "the longest queue, then the oldest"
    assert keys(search="MANY:069", sort="key") == names[690:]
    assert keys(search="a task of") == ["last"], "who holds it can be searched for, too"
    assert site.json("/api/locks", search="no such") == {
        "total": 701,
        "matched": 0,
        "notes": 0,
        "locks": [],
    }


def test_a_waiter_is_found_wherever_it_stands(start_site: StartSite) -> None:
    """By its task, its id or its host; the row says who it is and where."""
    site = start_site()
    named(site, "sync[11-aa] w1 pid 1").lock("account:7")
    waiters = []
    for number in range(3):
        waiter = named(site, f"sync[22-b{number}] w2 pid {number}")
        waiter.request("l", "account:7", "60")
        waiters.append(waiter)
        eventually(lambda number=number: waiting(site, "account:7", number + 1))
    [row] = site.json("/api/locks", search="22-B1")["locks"]
    assert row["key"] == "account:7"
    assert row["holder"]["label"] == "sync[11-aa] w1 pid 1"
    assert (row["match"]["label"], row["match"]["position"]) == ("sync[22-b1] w2 pid 1", 2)
    assert row["match"]["waited_s"] >= 0
    assert (row["matches"], row["waiters"]) == (1, 3)
    [row] = site.json("/api/locks", search="sync[")["locks"]
    assert (row["match"]["position"], row["matches"]) == (0, 4), "the holder first"
    [row] = site.json("/api/locks", search="account")["locks"]
    assert row["match"] is None, "the key itself"


def test_the_longest_wait_first(start_site: StartSite) -> None:
    site = start_site()
    for key in ("b", "a", "idle"):
        site.server.connect().lock(key)
    first, second, third = (site.server.connect() for _ in range(3))
    first.request("l", "a", "60")
    eventually(lambda: waiting(site, "a", 1))
    second.request("l", "b", "60")
    third.request("l", "b", "60")
    eventually(lambda: waiting(site, "b", 2))
    rows = site.json("/api/locks", sort="wait")["locks"]
    assert [row["key"] for row in rows] == ["a", "b", "idle"]
    assert rows[0]["oldest_wait_s"] >= rows[1]["oldest_wait_s"] >= 0
    assert rows[2]["oldest_wait_s"] is None


def test_notes_of_programs_are_shown_to_who_asks(start_site: StartSite) -> None:
    site = start_site()
    client = site.server.connect()
    for key in ("work", "celery-done:task", "shop:celery-done:task"):
        client.lock(key)
    seen = site.json("/api/locks", sort="key")
    assert [row["key"] for row in seen["locks"]] == ["work"]
    assert (seen["matched"], seen["notes"], seen["total"]) == (1, 2, 3)
    assert site.json("/api/locks", all=1)["matched"] == 3


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ({"limit": "0"}, "0 is not from 1 to 500"),
        ({"limit": "501"}, "501 is not from 1 to 500"),
        ({"limit": "many"}, "limit or offset: not a whole number from 1 to 500"),
        ({"offset": "-1"}, "limit or offset: not a whole number from 0 to 10000"),
        ({"offset": "10001"}, "10001 is not from 0 to 10000"),
        ({"sort": "luck"}, "sort: not one of waiters, wait, age, key"),
    ],
)
def test_a_bad_question_is_refused(site: Site, query: dict[str, str], complaint: str) -> None:
    answer = site.ask(f"/api/locks?{urlencode(query)}")
    assert answer.status == 400
    assert complaint in answer.json["error"]


@pytest.mark.parametrize(
    "path", ["/api/lock", "/api/lock?key=", "/api/locks/", "/api/locks/x?space=mutex"]
)
def test_a_key_and_its_space_must_be_said(site: Site, path: str) -> None:
    assert site.ask(path).status in (400, 404)


@pytest.mark.parametrize("key", ["%00", "x" * 4000])
def test_what_can_be_no_key_is_held_by_nobody(site: Site, key: str) -> None:
    for path in (f"/api/locks/{key}", f"/api/lock?key={key}", f"/api/locks?search={key}"):
        answer = site.ask(path)
        assert answer.status == 200
        assert not answer.json.get("holders")
        assert not answer.json.get("locks")


@pytest.mark.parametrize("key", ["%FF", "%ed%a0%80"])
def test_a_key_that_is_not_utf8_is_no_other_key(closed_site: Site, key: str) -> None:
    for path in (f"/api/locks/{key}", f"/api/lock?key={key}", f"/api/locks?search={key}"):
        assert closed_site.ask(path).status == 400
    for method in ("POST", "DELETE"):
        assert closed_site.ask(f"/api/pause?key={key}", method).status == 400
    assert closed_site.metric("dflockd_paused_keys") == 0


def test_totals(start_site: StartSite) -> None:
    site = start_site()
    client = site.server.connect()
    token = client.lock("one")
    client.lock("two")
    assert client.ask("n", "one", token).startswith("ok ")
    waiter = site.server.connect()
    waiter.request("l", "two", "30")
    eventually(lambda: waiting(site, "two", 1))
    assert client.ask("r", "one", token) == "ok"

    stats = site.json("/api/stats")

    assert (stats["keys"], stats["holds"], stats["waiters"]) == (1, 1, 1)
    assert (stats["connections"], stats["max_keys"]) == (2, 1024)
    assert stats["totals"]["grants"] == 2
    assert (stats["totals"]["released"], stats["totals"]["renewed"]) == (1, 1)
    assert stats["ready"] is True
    assert stats["uptime_s"] > 0
    assert stats["compiled"] is dflockd.compiled


def evict(site: Site, key: str, fence: object, **headers: str) -> Answer:
    return site.ask(f"/api/locks/{quote(key, safe='')}?fence={fence}", "DELETE", headers)


def test_nobody_releases_the_locks_of_others_on_a_server_without_a_token(site: Site) -> None:
    holder = site.server.connect()
    token = holder.lock("theirs")
    answer = evict(site, "theirs", int(token[:16], 16))
    assert answer.status == 403
    assert "--auth-token-file" in answer.json["error"]
    assert site.json("/api/stats")["can_release"] is False
    assert holder.ask("r", "theirs", token) == "ok"


def test_an_operator_releases_a_lock(closed_site: Site) -> None:
    site = closed_site
    holder = named(site, "stuck")
    token = holder.lock("stuck:1")
    waiter = named(site, "next")
    waiter.request("l", "stuck:1", "30")
    eventually(lambda: waiting(site, "stuck:1", 1))
    fence = site.lock("stuck:1")["holders"][0]["fence"]
    assert site.json("/api/stats")["can_release"] is True

    answer = evict(site, "stuck:1", fence, **basic("ann\nforged line"))

    assert (answer.status, answer.json) == (200, {"released": fence})
    assert waiter.line().startswith("ok "), "the next one has it at once"
    assert holder.ask("n", "stuck:1", token) == "error", "and the holder learns that it is lost"
    clients = json.loads(holder.ask("stats").removeprefix("ok "))["connections"]
    assert clients == site.json("/api/stats")["connections"], "an operator is no client"
    line = site.server.wait_for_log("evicts the holder of 'stuck:1' ")
    assert line == f"with fence {fence}"
    assert any(r"'ann\nforged line' at 127.0.0.1 evicts" in line for line in site.server.log)


def test_each_that_an_operator_releases_has_its_line(closed_site: Site) -> None:
    """However many in one second: the log of other things is sparing with those."""
    site = closed_site
    holder = named(site, "many")
    fences = [int(holder.lock(f"many:{number}")[:16], 16) for number in range(3)]
    for number, fence in enumerate(fences):
        assert evict(site, f"many:{number}", fence, **basic("ann")).status == 200
    for number, fence in enumerate(fences):
        assert site.server.wait_for_log(f"of 'many:{number}' ") == f"with fence {fence}"


def test_only_the_holder_that_was_meant_is_released(closed_site: Site) -> None:
    site = closed_site
    holder = named(site, "new")
    token = holder.lock("again")
    fence = int(token[:16], 16)
    other = fence + 1_000_000
    assert evict(site, "again", other).status == 409
    assert evict(site, "again", "").status == 400
    assert evict(site, "again", "1e9").status == 400
    assert evict(site, "never-held", fence).status == 409
    assert holder.ask("n", "again", token).startswith("ok ")
    # The log tells of what was done. A key that nobody holds is not in it: it may be anything.
    evict(site, "again", fence)
    site.server.wait_for_log(f"evicts the holder of 'again' with fence {fence}")
    log = "\n".join(site.server.log)
    assert "never-held" not in log
    assert str(other) not in log


def pause(site: Site, method: str, **query: object) -> Answer:
    return site.ask(f"/api/pause?{urlencode(query)}", method)


def test_nobody_pauses_a_key_on_a_server_without_a_token(site: Site) -> None:
    for method in ("POST", "DELETE"):
        answer = pause(site, method, key="theirs")
        assert answer.status == 403
        assert "--auth-token-file" in answer.json["error"]
    site.server.connect().lock("theirs")


def test_an_operator_pauses_a_key_and_resumes_it(closed_site: Site) -> None:
    site = closed_site
    answer = site.ask(
        f"/api/pause?{urlencode({'key': 'vendor:7', 'for': 90, 'reason': 'it is down'})}",
        "POST",
        basic("ann"),
    )
    assert (answer.status, answer.json) == (200, {"paused": "vendor:7"})
    waiter = named(site, "waiter")
    waiter.request("l", "vendor:7", "30")
    eventually(lambda: waiting(site, "vendor:7", 1))
    paused = site.lock("vendor:7")["paused"]
    assert (paused["by"], paused["reason"]) == ("'ann' at 127.0.0.1", "it is down")
    assert 60 < paused["left_s"] <= 90 - paused["paused_s"] + 0.01
    (row,) = site.json("/api/locks", search="vendor")["locks"]
    assert (row["paused"]["reason"], row["holder"], row["waiters"]) == ("it is down", None, 1)
    assert site.metric("dflockd_paused_keys") == 1

    assert pause(site, "DELETE", key="vendor:7").json == {"resumed": "vendor:7"}

    assert waiter.line().startswith("ok ")
    assert site.lock("vendor:7")["paused"] is None
    assert site.metric("dflockd_paused_keys") == 0
    assert pause(site, "DELETE", key="vendor:7").status == 409
    site.server.wait_for_log("pauses 'vendor:7' for 90 s, by \"'ann' at 127.0.0.1\": 'it is down'")
    site.server.wait_for_log("resumes 'vendor:7'")


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"key": "a b"},
        {"key": "k", "space": "semaphore"},
        {"key": "k", "for": "0"},
        {"key": "k", "for": "1.5"},
        {"key": "k", "for": "9223373"},
        {"key": "k", "reason": "two\nlines"},
        {"key": "k", "by": "x" * 257},
    ],
)
def test_a_pause_that_cannot_be_meant(closed_site: Site, query: dict[str, object]) -> None:
    assert pause(closed_site, "POST", **query).status == 400
    assert closed_site.lock("k")["paused"] is None


@pytest.mark.parametrize("path", ["/api/lock", "/api/pause", "/api/locks/k"])
def test_what_changes_something_refuses_parameters_that_it_does_not_know(
    closed_site: Site, path: str
) -> None:
    allowed = closed_site.ask(path, "PATCH").headers["Allow"].split(",")
    changes = set(allowed) - {"GET", "HEAD"}
    assert changes
    for method in changes:
        answer = closed_site.ask(f"{path}?key=k&fro=60", method)
        assert (answer.status, "parameter" in answer.json["error"]) == (400, True), method
    assert closed_site.lock("k")["paused"] is None


def test_as_many_keys_are_paused_as_there_may_be_locks(start_site: StartSite) -> None:
    site = start_site("--max-locks", "1", "--auth-token", SECRET)
    site.headers = bearer()
    assert pause(site, "POST", key="one").status == 200
    assert pause(site, "POST", key="two").status == 409


def test_nothing_shown_is_secret(closed_site: Site) -> None:
    """Neither the shared secret nor a token, with which anybody could renew and release."""
    site = closed_site
    holder = named(site, "somebody")
    tokens = [holder.lock("secret:1"), holder.lock("secret:2")]
    named(site, "else").request("l", "secret:1", "30")
    eventually(lambda: waiting(site, "secret:1", 1))
    paths = ["/", "/page.js", "/metrics", "/api/stats", "/api/locks", "/api/locks/secret:1"]
    paths += ["/healthz", "/readyz", "/api/shards", "/nowhere"]
    for path in paths:
        answer = site.ask(path)
        everything = answer.body + str(answer.headers)
        assert SECRET not in everything, path
        for token in tokens:
            # The half of it that cannot be guessed; the other is the fence.
            assert token[16:] not in everything, path
    log = "\n".join(site.server.log)
    assert SECRET not in log
    assert not any(token[16:] in log for token in tokens)


def test_a_cluster_is_not_pretended(site: Site) -> None:
    assert site.ask("/api/shards").status == 404
    assert site.json("/api/stats")["cluster"] is None


def test_what_is_shown_ends_with_the_server(start_site: StartSite) -> None:
    site = start_site()
    site.json("/api/stats")
    site.server.signal(signal.SIGTERM)
    assert site.server.wait() == 0
    with pytest.raises(OSError, match=r"refused|reset"):
        site.ask("/healthz")


def test_answers_are_json(site: Site) -> None:
    for path in ("/api/stats", "/api/locks", "/api/locks/x", "/api/lock", "/api/shards", "/readyz"):
        answer = site.ask(path)
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8", path
        json.loads(answer.body)


def test_on_asyncio_alone(start_site: StartSite) -> None:
    site = start_site(uvloop=False)
    site.server.connect().lock("plain")
    assert site.lock("plain")["key"] == "plain"
    assert site.metric("dflockd_grants_total") == 1
    assert site.metric("dflockd_connections") == 1


def test_the_token_is_needed_for_every_character(closed_site: Site) -> None:
    assert closed_site.ask("/api/stats", headers=bearer(SECRET[:-1])).status == 401
