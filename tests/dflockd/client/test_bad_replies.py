"""What a server says that is not the protocol is an error that says so, whatever it is.

Each method takes any bytes: they mean something, or they are a `BadReplyError`, a `RefusedError` or an
`UnreachableError`. Nothing else ever comes out, and nothing is left behind that does not work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflockd import errors
from dflockd.client import operations
from dflockd.wire import (
    FEATURES,
    Acquire,
    Auth,
    Enqueue,
    Enqueued,
    Evict,
    Granted,
    Hello,
    How,
    Inspect,
    Pause,
    Release,
    Renew,
    Resume,
    Shards,
    Status,
    Wait,
    Welcome,
)
from tests.dflockd.client_support import Calls, Client, Face, until
from tests.dflockd.scripted_server import Kind, Last, ScriptedServer, grant, renewed

pytestmark = pytest.mark.usefixtures("no_idle_connections")

TOKEN = b"0000000000000001" + b"ab" * 8
ALLOWED = (errors.BadReplyError, errors.RefusedError, errors.UnreachableError)

PIECES = st.sampled_from(
    [
        *(b"ok", b"acquired", b"queued", b"timeout", b"error", b"error_auth", b"error_moved"),
        *(b"error_recovering", b"error_owner", b"held", b"waiting", b"error_lease_expired"),
        *(
            TOKEN,
            b"",
            b" ",
            b"0",
            b"1",
            b"33",
            b"-1",
            b"9223372036",
            b"9" * 30,
            b"1.5",
            b"\xc2\xb2",
        ),
        *(b"\xff\xfe", b"\x00", b"\r", b"{", b"{}", b'{"a": 1}', b'{"a": ', b"[]", b"null", b"NaN"),
        *(b"127.0.0.1:1", b"host", b"[::1", b"unix:/tmp/x", b"a b", "²".encode(), b"\x1b[2J"),
    ]
)
LINES = st.one_of(
    st.binary(max_size=80),
    st.lists(PIECES, max_size=6).map(b" ".join),
    st.lists(PIECES | st.binary(max_size=3), max_size=6).map(b"".join),
    st.tuples(
        st.sampled_from([b"ok", b"acquired"]), st.binary(min_size=1, max_size=40), st.just(b"33")
    ).map(b" ".join),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(max_size=5) | st.just("holders"), inner, max_size=3)
        ),
        max_leaves=5,
    ).map(lambda document: b"ok " + json.dumps(document).encode()),
)
REPLIES = st.one_of(
    LINES.map(lambda line: line + b"\n"),
    LINES.map(lambda line: line + b"\r\n"),
    # Without its end, more than one, or nothing: the connection ends, for a test has no time to wait.
    st.lists(LINES, max_size=3).map(lambda lines: Last(b"\n".join(lines))),
).map(lambda reply: reply if b"\n" in reply else Last(reply))

many = settings(
    max_examples=settings.default.max_examples // 2,  # for each client: they share most of it
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def checked(exc: errors.RemoteError, scripted: ScriptedServer) -> None:
    assert "\n" not in str(exc)
    assert "\r" not in str(exc)
    assert str(scripted) in str(exc)


def looked_at(lock: Any) -> None:
    """Read all that can be read."""
    assert lock.held in (True, False)
    assert lock.token is None or (lock.token.isprintable() and " " not in lock.token)
    assert isinstance(lock.lease, int)
    assert lock.fence is None or isinstance(lock.fence, int)
    assert "\n" not in repr(lock)


METHODS: dict[str, tuple[Kind, Callable[[Any], Any], tuple[Any, ...]]] = {
    "acquire": (Acquire, lambda lock: lock.acquire(), (True, False)),
    "enqueue": (Enqueue, lambda lock: lock.enqueue(), ("acquired", "queued")),
    "wait": (Wait, lambda lock: lock.wait(0), (True, False)),
    "adopt": (How.CONFIRM, lambda lock: lock.adopt(TOKEN.decode()), (True, False)),
    "renew": (Renew, lambda lock: lock.renew(), (True, False)),
    "detach": (How.DETACH, lambda lock: lock.detach(), None),
    "release": (Release, lambda lock: lock.release(), (True, False)),
    "evict": (Evict, lambda lock: lock.evict(5), (True, False)),
    "pause": (Pause, lambda lock: lock.pause(by="me"), (None,)),
    "resume": (Resume, lambda lock: lock.resume(), (True, False)),
    "inspect": (Inspect, lambda lock: lock.inspect(), None),
    "auth": (Auth, lambda lock: lock.acquire(), (True, False)),
    "hello": (Hello, lambda lock: lock.acquire(), (True, False)),
}
WELCOME = Welcome(b"1.0", FEATURES)
HELD = ("renew", "detach", "release")


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", METHODS)
def test_any_bytes(
    face: Face, scripted: ScriptedServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, call, meanings = METHODS[name]
    if name == "renew":  # it is tried again on other connections, for as long as the lease lasts
        monkeypatch.setattr(operations, "REPLY_PATIENCE", 0.2)

    def make() -> Any:
        # The connection of before may have said the last that it will ever say.
        servers = [("127.0.0.1", scripted.port)]
        secret = "secret" if name == "auth" else None
        return face.module.DistributedLock("key", 0, 30, servers=servers, auth_token=secret)

    @many
    @given(reply=REPLIES)
    def check(reply: bytes) -> None:
        for each in (How.CONFIRM, Wait, How.DETACH, Evict, Inspect):
            scripted.script(each, Status.ERROR)
        # A published server is shown the token by itself.
        scripted.script(Hello, Status.ERROR if name == "auth" else WELCOME)
        scripted.script(Auth, Status.OK)
        scripted.script(Acquire, grant)
        scripted.script(Release, Status.OK)
        scripted.script(Renew, renewed)
        scripted.script(Enqueue, Status.QUEUED)
        lock = make()
        if name in HELD:
            assert face.do(lock.acquire()) is True
        elif name == "wait":
            assert face.do(lock.enqueue()) == "queued"
        if name in ("auth", "hello"):
            scripted.cut()  # only a new connection says so
        scripted.script(kind, reply)
        try:
            result = face.do(call(lock))
        except ALLOWED as exc:
            checked(exc, scripted)
            assert name != "release", "it says in the log what went wrong"
            assert name == "renew" or not lock.held
        else:
            assert meanings is None or result in meanings
        looked_at(lock)
        scripted.script(kind, {Acquire: grant, Hello: WELCOME}.get(kind, Status.OK))
        face.do(lock.release())
        # What is left in the pool is in order, or nobody uses it.
        after = make()
        assert face.do(after.acquire()) is True
        assert face.do(after.release()) is True

    check()


@pytest.mark.parametrize("name", ["hello", "acquire", "adopt"])
def test_an_empty_line(face: Face, scripted: ScriptedServer, name: str) -> None:
    """It is an answer, and not silence."""
    kind, call, _ = METHODS[name]
    scripted.script(Hello, WELCOME)
    scripted.script(kind, b"\n")
    lock = face.module.DistributedLock("key", 0, 30, servers=[("127.0.0.1", scripted.port)])
    with pytest.raises(errors.BadReplyError):
        face.do(call(lock))
    assert lock.state == "free"


# The renewal in the background has nobody to raise an error to.


RENEWALS = [
    b"\xff\xfe\n",
    b"ok\n",
    b"ok -1\n",
    b"ok \xc2\xb2\n",
    b"ok 33\nok 33\n",
    b'ok {"a": 1}\n',
    b"error_moved 1 1 [::1 x\n",
    b"error_owner held 99999999999999\n",
    Last(b"ok 3"),
    Last(b""),
]


async def test_renewals_that_are_answered_by_anything(
    client: Client, scripted: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The lock is lost with its lease, once, and other locks go on."""
    caplog.set_level(logging.INFO)
    answers = {b"key-%d" % number: reply for number, reply in enumerate(RENEWALS)}
    scripted.script(Renew, lambda request: answers.get(request.key, renewed(request)))
    lost = {key: Calls() for key in [*answers, b"other"]}
    servers = [("127.0.0.1", scripted.port)]
    other, *locks = [
        client.lock(key.decode(), servers=servers, lease_ttl_s=1, on_lost=lost[key])
        for key in [b"other", *answers]
    ]
    for lock in (other, *locks):
        assert await lock.acquire() is True
    await asyncio.gather(*(lost[key].first() for key in answers))
    assert not any(lock.held for lock in locks)

    def asked() -> int:
        return sum(request.key == b"other" for request in scripted.asked(Renew))

    before = asked()
    await until(lambda: asked() > before + 1)
    assert other.held
    assert [len(lost[key].locks) for key in answers] == [1] * len(answers)
    assert not lost[b"other"].locks
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    for lock in (other, *locks):
        await lock.release()


# What is wrong in a whole: a grant whose token is not one, a report that is none, a map that is none.


@pytest.mark.parametrize("token", [b"\xff\xfe", b"t\x00ken", b"t\x1b[2Jken", "jeton-é".encode()])
def test_a_token_that_is_none(face: Face, scripted: ScriptedServer, token: bytes) -> None:
    servers = [("127.0.0.1", scripted.port)]
    for kind, reply in ((Acquire, Granted(token, 33)), (Enqueue, Enqueued(token, 33))):
        scripted.script(kind, reply)
        lock = face.module.DistributedLock("key", servers=servers)
        with pytest.raises(errors.BadReplyError, match=str(scripted)) as caught:
            face.do(lock.acquire() if kind is Acquire else lock.enqueue())
        assert "\n" not in str(caught.value)
        assert not lock.held
        assert lock.token is None
        face.do(lock.release())


@pytest.mark.parametrize(
    "report",
    [
        b"{",
        b'{"a": ',
        b"{" + b'"a":{' * 5000 + b"}" * 5001,
        b'{"holders": "\xff"}',
        b'{"holders": 5}',
        b'{"holders": [5], "waiters": []}',
        b"{}",
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=str,
)
def test_a_report_that_is_none(face: Face, scripted: ScriptedServer, report: bytes) -> None:
    """Whoever reads it relies on its lists."""
    scripted.script(Inspect, b"ok " + report + b"\n")
    lock = face.module.DistributedLock("key", servers=[("127.0.0.1", scripted.port)])
    with pytest.raises(errors.BadReplyError, match=str(scripted)) as caught:
        face.do(lock.inspect())
    assert "\n" not in str(caught.value)


MAPS = [
    b"ok",
    b"ok {",
    b"ok {}",
    b"ok []",
    b"ok {" + b'"a":{' * 5000 + b"}" * 5001,
    b'ok {"servers": 5, "shards": [0], "epochs": [1]}',
    b'ok {"servers": ["a"], "shards": 5, "epochs": 5}',
    b'ok {"servers": ["a"], "shards": {}, "epochs": {}}',
    b'ok {"servers": ["a"], "shards": "0", "epochs": "1"}',
    b'ok {"servers": ["a"], "shards": [[0]], "epochs": [1]}',
    b'ok {"servers": ["a"], "shards": [0.5], "epochs": [1]}',
    b'ok {"servers": ["a"], "shards": [null], "epochs": [1]}',
    b'ok {"servers": ["a"], "shards": [3], "epochs": [1]}',
    b'ok {"servers": [["a", 1]], "shards": [0], "epochs": [1]}',
    b'ok {"servers": ["a b"], "shards": [0], "epochs": [1]}',
    b'ok {"servers": ["cluster://a"], "shards": [0], "epochs": [1]}',
    b'ok {"servers": [], "shards": [], "epochs": []}',
    b'ok {"zlib": 5}',
    b'ok {"zlib": "=="}',
    b'ok {"zlib": "\xc3\xa9"}',
    b'ok {"zlib": "eJyrBgABTgDR"}',
    b'ok {"version": {}, "zlib": null}',
    b'ok {"servers": ["a"], "shards": [0], "epochs": [' + b"9" * 5000 + b"]}",
    b"\xff",
    b"queued",
]


@pytest.fixture
def many_scripted() -> Iterator[list[ScriptedServer]]:
    with contextlib.ExitStack() as stack:
        servers = [ScriptedServer() for _ in MAPS]
        for server in servers:
            stack.callback(server.stop)
        yield servers


async def test_a_map_that_is_none(client: Client, many_scripted: list[ScriptedServer]) -> None:
    """All at once: each is asked until the time is over."""

    async def ask(server: ScriptedServer, answer: bytes) -> None:
        server.script(Shards, answer + b"\n")
        lock = client.lock("key", servers=f"cluster://{server}", acquire_timeout_s=0)
        with pytest.raises(ALLOWED) as caught:
            await lock.acquire()
        assert "\n" not in str(caught.value)

    await asyncio.gather(*map(ask, many_scripted, MAPS))
