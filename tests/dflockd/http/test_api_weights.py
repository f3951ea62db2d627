"""What the HTTP API says of keys where somebody takes more than one slot."""

from __future__ import annotations

from dflockd.wire import MAX_LIMIT
from tests.dflockd.http.http_site import StartSite, named
from tests.dflockd.http.test_api import waiting
from tests.dflockd.raw_server import eventually


def test_weights_and_what_is_used(start_site: StartSite) -> None:
    site = start_site()
    three = named(site, "three", limit=8, weight=3)
    token = three.lock("gpu")
    one = named(site, "one", limit=8)
    one.lock("gpu")
    writer = named(site, "all", limit=8, weight=MAX_LIMIT, group="g")
    writer.request("l", "gpu", "60")
    eventually(lambda: waiting(site, "gpu", 1))

    [row] = site.json("/api/locks")["locks"]
    assert (row["holders"], row["used"], row["limit"]) == (2, 4, 8)
    lock = site.lock("gpu")
    assert lock["used"] == 4
    assert [(each.get("weight"), each["details"]) for each in lock["holders"]] == [
        (3, ["weight 3"]),
        (None, []),
    ]
    [waiter] = lock["waiters"]
    assert (waiter["weight"], waiter["details"]) == ("all", ["group g", "weight all"])

    # One for each holder is not said, and all is what the limit is.
    assert three.ask("r", "gpu", token) == "ok"
    assert "used" not in site.lock("gpu")
    one.close()
    assert writer.line().startswith("ok ")
    assert site.lock("gpu")["used"] == 8
