"""What the HTTP API says of keys where groups take turns."""

from __future__ import annotations

from typing import Any

from tests.dflockd.http.http_site import StartSite, named
from tests.dflockd.http.test_api import waiting
from tests.dflockd.raw_server import eventually


def test_the_longest_wait_of_groups_is_not_that_of_the_next(start_site: StartSite) -> None:
    site = start_site()

    def come(key: str, group: str, waiters: int) -> None:
        said: dict[str, Any] = {"limit": 2, "group": group, "group-limit": 1}
        named(site, group, **said).request("l", key, "60")
        eventually(lambda: waiters == 0 or site.lock(key)["waiters"][waiters - 1 :])

    come("grouped", "a", 0)
    eventually(lambda: site.lock("grouped")["holders"])
    come("grouped", "a", 1)
    other = site.server.connect()
    other.request("l", "plain", "60")
    eventually(lambda: site.lock("plain")["holders"])
    site.server.connect().request("l", "plain", "60")
    eventually(lambda: waiting(site, "plain", 1))
    come("grouped", "b", 1)
    come("grouped", "c", 2)
    listed = site.lock("grouped")["waiters"]
    assert [each["group"] for each in listed] == ["c", "a"]
    rows = site.json("/api/locks", sort="wait")["locks"]
    assert [row["key"] for row in rows] == ["grouped", "plain"]
    assert rows[0]["oldest_wait_s"] >= listed[1]["waited_s"]
