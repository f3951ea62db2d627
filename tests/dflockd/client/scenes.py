"""A lock with what stands around it, to be interrupted in what it does; and what is true afterwards."""

from __future__ import annotations

import gc
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from dflockd import client, errors, sync_client
from dflockd.client import connection, process
from tests.dflockd.client_support import is_free, stats, waiters
from tests.dflockd.raw_server import ServerProcess, granted


class Scene:
    """A lock with what stands around it, to be interrupted in what it does.

    The methods that begin with ``do_`` do it; each is the same with either client.
    """

    def __init__(
        self, server: ServerProcess, key: str, lock: Any, rival: Any, owner: str = ""
    ) -> None:
        self.server = server
        self.owner = owner
        """As whom the rival holds it."""
        self.key = key
        self.lock = lock
        self.rival = rival
        self.token: str | None = None
        """The rival's."""
        self.detached: str | None = None
        self.is_taken = False
        """Whether the lock was taken from its holder, or will be, who may not know yet."""

    def hold(self) -> None:
        """Let the rival have the lock."""
        said = f"timeout=0 lease=600{self.owner}"
        self.token = granted(self.rival.ask("acquire", self.key, said))

    def unhold(self) -> None:
        token, self.token = self.token, None
        if token is not None:
            assert self.rival.ask("r", self.key, token) == "ok"


def queue(scene: Scene) -> None:
    assert scene.lock.enqueue() == "queued"
    scene.unhold()
    assert scene.lock.wait() is True
    assert scene.lock.release() is True


def leaving(scene: Scene) -> None:
    assert scene.lock.enqueue() == "queued"
    assert scene.lock.release() is False


def waiting_in_vain(scene: Scene) -> None:
    assert scene.lock.enqueue() == "queued"
    assert scene.lock.wait(0) is False


def in_vain(scene: Scene) -> None:
    assert scene.lock.acquire() is False


def conflict(scene: Scene) -> None:
    """The same run holds it: that is an answer in order, on a connection that stays."""
    with pytest.raises(errors.OwnerConflictError):
        scene.lock.acquire()
    with pytest.raises(errors.OwnerConflictError):
        scene.lock.enqueue()


def adopting(scene: Scene) -> None:
    token, scene.token = scene.token, None
    scene.detached = token
    assert scene.lock.adopt(token) is True
    scene.detached = None
    assert scene.lock.release() is True


BUSY = {"queue", "leaving", "waiting_in_vain", "in_vain", "conflict", "adopting"}
"""Where somebody else holds the lock at first."""

FREED = 30
"""Seconds to wait for what is free at once; no lease ends so soon."""


def told(exc: BaseException) -> str:
    return "".join(traceback.format_exception(exc))


CLIENT = str(Path(client.__file__).parent)


def functions_in(exc: BaseException) -> list[str]:
    """Return which of the client's functions were interrupted."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(exc.__traceback__)]
    return [code.co_name for code in frames if code.co_filename.startswith(CLIENT)]


NOT_BEGUN = (
    *([], ["__exit__"], ["release"], ["renew"], ["detach"], ["wait"]),
    *(["check"], ["token"], ["held"], ["__aexit__"], ["__aexit__", "release"]),
)
"""Where nothing was done yet of what was to be done."""


def may_stand(functions: list[str]) -> bool:
    """Whether what was there before the interruption may be there still."""
    return (
        functions in NOT_BEGUN
        or functions[0] in ("renew", "check", "token")
        # It was held before.
        or (functions[0] == "wait" and "drive" not in functions)
    )


def has_begun(exc: BaseException) -> bool:
    """Whether what was interrupted last had come to any line of its own."""
    *_, (frame, line) = (
        each
        for each in traceback.walk_tb(exc.__traceback__)
        if each[0].f_code.co_filename.startswith(CLIENT)
    )
    return line > frame.f_code.co_firstlineno


def check_after(scene: Scene, exc: BaseException) -> None:
    """Nothing is left behind, or the object says truly what is, and both can be used again."""
    lock, server, key = scene.lock, scene.server, scene.key
    functions = functions_in(exc)
    state = lock.state
    if state in ("held", "queued", "asking", "doubtful"):
        assert state in ("held", "queued"), told(exc)
        assert may_stand(functions), told(exc)
        if functions in (["__exit__"], ["release"]):
            assert not has_begun(exc), told(exc)
        if state == "queued" and scene.token is not None:
            assert waiters(server, key) == 1
        else:
            assert not is_free(server, key) or scene.is_taken
        assert lock.release() is (state == "held") or scene.is_taken, told(exc)
    scene.unhold()
    detached, scene.detached = scene.detached, None
    if detached is not None:
        # Whoever has the token can end it.
        scene.rival.ask("r", key, detached)
    reply = scene.rival.ask("l", key, FREED)
    assert reply != "timeout", told(exc)
    assert scene.rival.ask("r", key, granted(reply)) == "ok"
    assert not lock.held
    assert lock.acquire() is True, told(exc)
    assert lock.release() is True, told(exc)
    # The connections that are left have no answers waiting in them.
    for _ in range(2):
        with sync_client.DistributedLock(key, FREED, servers=[("127.0.0.1", server.port)]):
            pass
    assert lock.state == "free"
    # Of this thread: the reactor may be about to connect for somebody who has gone.
    assert threading.get_ident() not in connection._making


def connections(server: ServerProcess) -> int:
    """Return how many stay when nobody uses them."""
    process.close_idle_connections()
    process.current().reactor.call(int)  # it forgets what is over when it wakes
    gc.collect()
    return int(stats(server)["connections"])
