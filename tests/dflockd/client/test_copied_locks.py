"""A lock object is one owner of one lock: there is no second one of it."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.dflockd.client_support import Face, is_free
from tests.dflockd.raw_server import ServerProcess

pytestmark = pytest.mark.usefixtures("no_idle_connections")

WAYS: list[Callable[[Any], object]] = [
    copy.copy,
    copy.deepcopy,
    pickle.dumps,
    lambda lock: pickle.dumps(lock, protocol=0),
    lambda lock: copy.deepcopy({"lock": [lock]}),
]


def make(face: Face, kind: str, key: str, server: ServerProcess) -> Any:
    servers = [("127.0.0.1", server.port)]
    if kind == "lock":
        return face.module.DistributedLock(key, servers=servers)
    return face.module.DistributedSemaphore(key, 1, servers=servers)


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=["copy", "deepcopy", "pickle", "pickle-0", "inside"])
def test_a_lock_is_not_copied(
    face: Face,
    server: ServerProcess,
    key: str,
    kind: str,
    is_held: bool,
    way: Callable[[Any], object],
) -> None:
    """A copy would be a second holder, and end the lock of the first when it is forgotten."""
    lock = make(face, kind, key, server)
    if is_held:
        assert face.do(lock.acquire()) is True
    with pytest.raises(TypeError, match=re.escape(key)) as caught:
        way(lock)
    assert "\n" not in str(caught.value)
    assert lock.held is is_held
    if kind == "lock":
        assert is_free(server, key) is not is_held
    assert face.do(lock.release()) is is_held


def test_a_lock_that_is_waited_for_is_not_copied(
    face: Face, server: ServerProcess, key: str
) -> None:
    holder, waiter = (make(face, "lock", key, server) for _ in range(2))
    face.do(holder.acquire())
    assert face.do(waiter.enqueue()) == "queued"
    with pytest.raises(TypeError, match=re.escape(key)):
        copy.copy(waiter)
    face.do(holder.release())
    assert face.do(waiter.wait()) is True
    assert face.do(waiter.release()) is True
