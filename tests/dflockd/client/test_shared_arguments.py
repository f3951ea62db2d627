"""Locks of one sort, whose arguments are checked once, are those that are made one by one."""

from __future__ import annotations

import contextlib
import functools
import ssl
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd import client, errors, sync_client
from dflockd.client import arguments
from dflockd.client.lock import LockBase
from dflockd.client.rated import RatedSession
from dflockd.wire import FairGroup, Rate, key_problem

keys: st.SearchStrategy[Any] = (
    st.text(st.sampled_from("abz09:{}~ \t\0\n\u00e9\u2028\udc80"), max_size=5)
    | st.sampled_from(["k" * 256, "k" * 257, "\u00e9" * 128, "\u00e9" * 129])
    | st.sampled_from([b"key", None, 1])
)
common = st.fixed_dictionaries(
    {},
    optional={
        "acquire_timeout_s": st.sampled_from([None, 0, 1.5, True, -1, float("nan"), "1"]),
        "lease_ttl_s": st.sampled_from([None, 1, 30, 0, 1.0, True]),
        "servers": st.sampled_from(
            [["lock-1"], ["lock-1", "lock-2"], ["unix:/s"], "cluster://a,b", [], "lock-1"]
        ),
        "sharding_strategy": st.sampled_from(
            [sync_client.stable_hash_shard, lambda _key, count: count - 1, lambda *_: 7, None]
        ),
        "renew_ratio": st.sampled_from([0.3, 0, 1]),
        "auth_token": st.sampled_from([None, "secret", "", "two\nlines"]),
        "ssl_context": st.sampled_from([None, ssl.create_default_context(), True]),
    },
)


class Callable:
    async def __call__(self, lock: object) -> None: ...

    async def method(self, lock: object) -> None: ...

    def plain(self, lock: object) -> None: ...


async def coroutine(lock: object) -> None: ...


def marked(lock: object) -> None: ...


marked._is_coroutine_mark = True  # type: ignore[attr-defined] # by inspect.markcoroutinefunction

its_own = st.fixed_dictionaries(
    {},
    optional={
        "label": st.text(max_size=3)
        | st.sampled_from(["", "_", "l" * 257, "\u00e9" * 200, b"l", None]),
        "owner": st.none()
        | st.tuples(
            st.sampled_from(["run", "", "a b", "r" * 64, "r" * 65, b"run"]),
            st.sampled_from([0, 3, -1, 1 << 40, True, 1.0]),
        ),
        "on_lost": st.sampled_from(
            [
                *(None, print, 7, coroutine, marked, Callable(), Callable().method),
                *(Callable().plain, functools.partial(coroutine), functools.partial(print)),
            ]
        ),
    },
)


def seen(make: Any) -> Any:
    """Return all that there is to a lock, or nothing if it is refused; of two faults either is said."""
    try:
        lock: LockBase = make()
    except errors.LocalError:
        return None
    session = lock._session
    its = session.target, session.route, session.shards, session._renew_ratio
    is_told = session._on_lost is not None
    return type(lock), lock.key, lock.acquire_timeout_s, lock.lease_ttl_s, its, is_told


@pytest.mark.parametrize("module", [sync_client, client])
def test_a_lock_has_no_limit(module: Any) -> None:
    for limit in (0, 2, None):
        with pytest.raises(errors.InvalidArgumentError, match="use a semaphore"):
            module.DistributedLock.maker(limit)


@pytest.mark.parametrize("module", [sync_client, client])
@given(limit=st.sampled_from([None, 1, 3, 0, True]), key=keys, common=common, own=its_own)
def test_a_lock_of_a_sort_is_the_lock_of_its_arguments(
    module: Any, limit: int | None, key: Any, common: dict[str, Any], own: dict[str, Any]
) -> None:
    kind, limits = module.DistributedLock, {}
    if limit is not None:
        kind, limits = module.DistributedSemaphore, {"limit": limit}
    one_by_one = seen(lambda: kind(key, **limits, **common, **own))
    assert seen(lambda: kind.maker(**limits, **common)(key, **own)) == one_by_one
    if limit is not None and one_by_one is not None:
        assert kind.maker(limit)("key").limit == kind("key", limit).limit == limit


@given(st.text("a \t\0\x7f\u00a0\u00e9", max_size=3) | st.text("a", min_size=254, max_size=258))
def test_no_key_passes_that_could_not_be_sent(key: str) -> None:
    problem: str | None = "it cannot be encoded"
    with contextlib.suppress(UnicodeEncodeError):
        problem = key_problem(key.encode())
    try:
        arguments.check_key(key)
    except errors.InvalidKeyError:
        assert problem
    else:
        assert not problem


def test_each_method_is_looked_at() -> None:
    make = sync_client.DistributedLock.maker()
    for _ in range(2):
        assert make("key", on_lost=Callable().plain).key == "key"
        with pytest.raises(errors.InvalidArgumentError, match="on_lost"):
            make("key", on_lost=Callable().method)


@pytest.mark.parametrize("servers", [["lock-1"], ["lock-1", "lock-2"]])
def test_a_strategy_of_the_user_is_asked_and_checked_whatever_there_is_to_choose(
    servers: list[str],
) -> None:
    lock = sync_client.DistributedLock
    for make in (lock.maker(servers=servers, sharding_strategy=lambda *_: 7), None):
        with pytest.raises(errors.InvalidArgumentError, match="returned 7"):
            make("key") if make else lock("key", servers=servers, sharding_strategy=lambda *_: 7)


def test_a_sort_has_a_rate_and_a_limit_of_groups() -> None:
    for module in (sync_client, client):
        kind = module.DistributedSemaphore
        make = kind.maker(3, rate="10/m", begins=False, group_limit=2)
        one_by_one = kind("key", 3, group="a", group_limit=2).with_rate("10/m", begins=False)
        for lock in (make("key", group="a"), one_by_one):
            session = lock._session
            assert isinstance(session, RatedSession)
            assert not session._begins
            assert session.target.rate == Rate(10, 60_000)
            assert session.target.group == FairGroup(b"a", 2)
        assert make("key")._session.target.group is None


@pytest.mark.parametrize(
    ("seconds", "milliseconds"), [(0.001, 1), (0.0014, 2), (16.1, 16_100), (1.0004, 1001)]
)
def test_a_window_is_rounded_up_for_no_run_is_to_begin_too_soon(
    seconds: float, milliseconds: int
) -> None:
    lock = sync_client.DistributedSemaphore("key", 3).with_rate((2, seconds))
    assert lock._session.target.rate == Rate(2, milliseconds)


@pytest.mark.parametrize("given", [{"rate": "10/d"}, {"rate": 10}, {"group_limit": 0}])
def test_what_a_sort_cannot_have_is_refused_before_a_lock_is_made(given: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=f"{next(iter(given))} is "):
        sync_client.DistributedLock.maker(**given)
