"""What servers do to a client, call by call, and what comes of each call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from dflockd import errors
from dflockd.wire import (
    Acquire,
    Auth,
    Enqueue,
    Enqueued,
    Evict,
    Granted,
    Hello,
    How,
    Inspect,
    OwnerConflict,
    Recovering,
    Release,
    Renew,
    Renewed,
    Report,
    Status,
    Unwelcome,
    Wait,
    format_token,
)
from tests.dflockd.scripted_server import (
    End,
    Kind,
    Last,
    ScriptedCluster,
    ScriptedServer,
    Silence,
    grant,
)

PATIENCE = 15.0
TOKEN = format_token(7, b"scenario").decode()

Call: TypeAlias = tuple[Any, ...]
Script: TypeAlias = Callable[[Any], object]


class Scenario(NamedTuple):
    """One row: what the server answers, and each call with what comes of it.

    A call is the name of a method and its arguments, or the name of an attribute, or one of the words
    that `_aside` knows. What comes of it is a value, or the class of an error.
    """

    script: Script
    calls: list[tuple[Call, Any]]
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    is_cluster: bool = False


def answers(**kinds: Any) -> Script:
    """Let a server answer each kind of request so, one after the other; the last repeats."""

    def script(server: ScriptedServer) -> None:
        for name, given in kinds.items():
            server.script(KINDS[name], *([*given] if isinstance(given, list) else [given]))

    return script


KINDS: dict[str, Kind] = {
    kind.__name__.lower(): kind
    for kind in (Acquire, Auth, Enqueue, Evict, Hello, Inspect, Release, Renew, Wait)
}
KINDS |= {"confirm": How.CONFIRM, "detach": How.DETACH}
HELD = Granted(TOKEN.encode(), 30)
REPORT = {"key": "k", "limit": 1, "holders": [], "waiters": []}
AT_ONCE = Enqueued(TOKEN.encode(), 30)

REFUSALS = {
    Status.ERROR: errors.RefusedError,
    Status.AUTH: errors.AuthRefusedError,
    Status.MAX_LOCKS: errors.MaxLocksError,
    Status.MAX_WAITERS: errors.MaxWaitersError,
    Status.MAX_HOLDS: errors.MaxHoldsError,
    Status.LIMIT_MISMATCH: errors.LimitMismatchError,
    Status.LEASE_EXPIRED: errors.LeaseExpiredError,
    Status.DRAINING: errors.DrainingError,
    Recovering(50): errors.RecoveringError,
    OwnerConflict(b"held", 1): errors.OwnerConflictError,
    Report(b"{}"): errors.BadReplyError,
    Renewed(5): errors.BadReplyError,
    End: errors.UnreachableError,
}


def moved(cluster: ScriptedCluster) -> None:
    """The map is out of date: the key is at the second server."""
    cluster.servers[0].script(Acquire, cluster.moved("k", 1, 8))


def recovering(cluster: ScriptedCluster) -> None:
    cluster.servers[0].script(Acquire, Recovering(50), Recovering(50), grant)


def gone(cluster: ScriptedCluster) -> None:
    """The server in charge hangs up, and the others say that another has taken its place."""
    cluster.servers[0].script(Acquire, End)
    cluster.is_at(1, 9)


TABLE: dict[str, Scenario] = {
    "it is free": Scenario(
        answers(acquire=HELD),
        [
            (("state",), "free"),
            (("acquire",), True),
            (("state",), "held"),
            (("token",), TOKEN),
            (("fence",), 7),
            (("check",), None),
            (("release",), True),
            (("state",), "free"),
            (("release",), False),
            (("connections",), 1),
        ],
    ),
    "somebody else has it": Scenario(
        answers(acquire=Status.TIMEOUT),
        [(("acquire",), False), (("state",), "free"), (("held",), False), (("connections",), 1)],
    ),
    "somebody else has it for a fraction of a second": Scenario(
        answers(acquire=[Status.TIMEOUT, Silence]),
        [(("acquire",), False), (("state",), "free")],
        {"acquire_timeout_s": 0.2},
    ),
    "with a lock that somebody else has": Scenario(
        answers(acquire=Status.TIMEOUT), [(("with",), errors.LockTimeoutError)]
    ),
    "with a lock that is free": Scenario(answers(), [(("with",), "held"), (("state",), "free")]),
    **{
        f"acquire is answered {getattr(answer, '__name__', answer)}": Scenario(
            answers(acquire=answer),
            [(("acquire",), error), (("state",), "free"), (("release",), False)],
            {"acquire_timeout_s": 0},
        )
        for answer, error in REFUSALS.items()
    },
    "nothing is answered": Scenario(
        answers(acquire=Silence),
        [(("acquire",), errors.UnreachableError), (("state",), "free")],
        {"acquire_timeout_s": 0},
    ),
    "the connection has died in the pool": Scenario(
        answers(),
        [
            (("acquire",), True),
            (("release",), True),
            (("cut",), None),
            (("acquire",), True),
            (("release",), True),
            (("connections",), 2),
        ],
    ),
    "the connection was given up in the pool": Scenario(
        answers(acquire=[grant, Status.ERROR, grant]),
        [(("acquire",), True), (("release",), True), (("acquire",), True), (("release",), True)],
    ),
    "another run of the owner has it": Scenario(
        answers(acquire=[OwnerConflict(b"held", 1), HELD]),
        [
            (("acquire",), errors.OwnerConflictError),
            (("state",), "free"),
            (("acquire",), True),
            (("release",), True),
            (("connections",), 1),
        ],
        {"owner": ("run", 1)},
    ),
    "another run of the owner waits for it": Scenario(
        answers(
            enqueue=[OwnerConflict(b"waiting", 1), Status.QUEUED], wait=OwnerConflict(b"waiting", 1)
        ),
        [
            (("enqueue",), errors.OwnerConflictError),
            (("state",), "free"),
            (("enqueue",), "queued"),
            (("wait",), errors.OwnerConflictError),
            (("state",), "free"),
            (("wait",), errors.NotEnqueuedError),
            (("connections",), 1),
        ],
        {"owner": ("run", 1)},
    ),
    "its server is a published one, and hangs up on hello": Scenario(
        answers(hello=Last(b"error\n"), acquire=HELD),
        [
            (("acquire",), True),
            (("release",), True),
            (("connections",), 2),
            (("acquire",), True),
            (("release",), True),
            (("connections",), 2),
        ],
        {"owner": ("run", 1), "label": "me"},
    ),
    "its server is a published one, and stays": Scenario(
        answers(hello=Status.ERROR, acquire=HELD),
        [(("acquire",), True), (("release",), True), (("connections",), 2)],
        {"owner": ("run", 1), "label": "me"},
    ),
    "it is held by this object": Scenario(
        answers(),
        [
            (("acquire",), True),
            (("acquire",), errors.AlreadyHeldError),
            (("enqueue",), errors.AlreadyHeldError),
            (("adopt", TOKEN), errors.AlreadyHeldError),
            (("state",), "held"),
            (("release",), True),
        ],
    ),
    "a position is served": Scenario(
        answers(enqueue=Status.QUEUED, wait=HELD),
        [
            (("wait",), errors.NotEnqueuedError),
            (("enqueue",), "queued"),
            (("state",), "queued"),
            (("enqueue",), errors.AlreadyHeldError),
            (("wait", 5), True),
            (("token",), TOKEN),
            (("release",), True),
        ],
    ),
    "a position is served at once": Scenario(
        answers(enqueue=AT_ONCE),
        [(("enqueue",), "acquired"), (("wait",), True), (("release",), True)],
    ),
    "a position is not served in time": Scenario(
        answers(enqueue=Status.QUEUED, wait=Status.TIMEOUT),
        [
            (("enqueue",), "queued"),
            (("wait", 1), False),
            (("state",), "free"),
            (("wait",), errors.NotEnqueuedError),
        ],
    ),
    "a position is given up": Scenario(
        answers(enqueue=Status.QUEUED),
        [(("enqueue",), "queued"), (("release",), False), (("state",), "free")],
    ),
    "the connection ends under a position": Scenario(
        answers(enqueue=Status.QUEUED, wait=End),
        [(("enqueue",), "queued"), (("wait",), errors.UnreachableError), (("state",), "free")],
    ),
    "the lease of a position has ended": Scenario(
        answers(enqueue=Status.QUEUED, wait=Status.LEASE_EXPIRED),
        [(("enqueue",), "queued"), (("wait",), errors.LeaseExpiredError), (("state",), "free")],
    ),
    "it is handed on": Scenario(
        answers(acquire=HELD, detach=Renewed(60)),
        [
            (("detach", 60), None),
            (("acquire",), True),
            (("detach", 60), TOKEN),
            (("state",), "free"),
            (("adopt", TOKEN), True),
            (("token",), TOKEN),
            (("release",), True),
        ],
    ),
    "what is adopted is no more": Scenario(
        answers(confirm=Status.LEASE_EXPIRED), [(("adopt", TOKEN), False), (("state",), "free")]
    ),
    "it is renewed": Scenario(
        answers(),
        [(("renew",), False), (("acquire",), True), (("renew", 60), True), (("lease",), 60)],
    ),
    "it is lost with its renewal": Scenario(
        answers(renew=Status.ERROR),
        [
            (("acquire",), True),
            (("renew",), False),
            (("state",), "lost"),
            (("losses",), 1),
            (("check",), errors.LockLostError),
            (("release",), False),
            (("state",), "free"),
            (("losses",), 1),
        ],
    ),
    "its connection breaks, and it is renewed on another": Scenario(
        answers(),
        [
            (("acquire",), True),
            (("cut",), None),
            (("asked", Renew), None),
            (("check",), None),
            (("state",), "held"),
            (("release",), True),
            (("losses",), 0),
        ],
    ),
    "its connection breaks, and it is lost": Scenario(
        answers(renew=Status.ERROR),
        [
            (("acquire",), True),
            (("cut",), None),
            (("comes", "lost"), None),
            (("check",), errors.LockLostError),
            (("comes to be told",), None),
            (("losses",), 1),
            (("acquire",), True),
            (("release",), True),
        ],
    ),
    "its connection breaks, and it is lost with its lease": Scenario(
        answers(renew=End),
        [
            (("acquire",), True),
            (("cut",), None),
            (("comes", "doubtful"), None),
            (("held",), False),
            (("check",), errors.LockLostError),
            (("state",), "lost"),
            (("comes to be told",), None),
            (("losses",), 1),
        ],
        {"lease_ttl_s": 1},
    ),
    "the connection ends under a release": Scenario(
        answers(release=[End, Status.OK]),
        [(("acquire",), True), (("release",), True), (("state",), "free")],
    ),
    "it was not held any more at its release": Scenario(
        answers(release=Status.ERROR),
        [(("acquire",), True), (("release",), False), (("state",), "free")],
    ),
    "a question is answered": Scenario(
        answers(inspect=Report(json.dumps(REPORT).encode()), evict=[Status.OK, Status.ERROR]),
        [(("inspect",), REPORT), (("evict", 7), True), (("evict", 7), False)],
    ),
    "a question is not understood": Scenario(
        answers(inspect=[Status.ERROR, Report(b"[")], evict=End),
        [
            (("inspect",), errors.RefusedError),
            (("inspect",), errors.BadReplyError),
            (("evict", 7), errors.UnreachableError),
        ],
    ),
    "a check of what was never held": Scenario(answers(), [(("check",), errors.LockLostError)]),
    "the secret is wrong": Scenario(
        answers(hello=Unwelcome(Status.AUTH)),
        [(("acquire",), errors.AuthRefusedError), (("state",), "free")],
        {"auth_token": "secret"},
    ),
    "the secret is wrong for a published server": Scenario(
        answers(hello=Last(b"error_auth\n"), auth=Status.AUTH),
        [(("acquire",), errors.AuthRefusedError), (("state",), "free")],
        {"auth_token": "secret"},
    ),
    "nobody is there": Scenario(
        lambda server: server.stop(),
        [(("acquire",), errors.UnreachableError), (("state",), "free")],
    ),
    "its shard has moved": Scenario(
        moved, [(("acquire",), True), (("at", 1), True), (("release",), True)], is_cluster=True
    ),
    "its shard is on its way": Scenario(
        recovering, [(("acquire",), True), (("at", 0), True), (("release",), True)], is_cluster=True
    ),
    "its server is gone": Scenario(
        gone, [(("acquire",), True), (("at", 1), True), (("release",), True)], is_cluster=True
    ),
}
