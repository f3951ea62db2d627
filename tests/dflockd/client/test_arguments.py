"""What users pass is checked where they pass it, and what is wrong gets one line."""

from __future__ import annotations

import datetime
import enum
import math
import pathlib
import ssl
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflockd import errors
from dflockd.wire import Enqueue, Evict, Pause, Status, Wait
from tests.dflockd.client_support import Face
from tests.dflockd.raw_server import PATIENCE
from tests.dflockd.scripted_server import ScriptedServer
from tests.effort import more

pytestmark = pytest.mark.usefixtures("no_idle_connections")


class Ambiguous:
    """As an array of numpy: neither true nor false, and comparing it gives another one."""

    def __bool__(self) -> bool:
        raise ValueError("the truth value of this is ambiguous")

    def _compare(self, _: object) -> Ambiguous:
        return self

    __lt__ = __le__ = __gt__ = __ge__ = _compare


class Colour(enum.Enum):
    RED = 1


def new(face: Face, kind: str, **options: Any) -> Any:
    """Make a lock or a semaphore, of which every argument may be given."""
    options = {"key": "key", **options}
    if kind == "lock":
        return face.module.DistributedLock(**options)
    return face.module.DistributedSemaphore(**{"limit": 1, **options})


def checked(exc: errors.LocalError) -> None:
    """Check that an error is one line that a user can read."""
    assert "\n" not in str(exc)
    assert len(str(exc)) < 1000
    assert isinstance(exc, ValueError)


BAD: list[tuple[str, Any]] = [
    ("owner", "run"),
    ("owner", ()),
    ("owner", ("run",)),
    ("owner", ("run", 1, 2, 3)),
    ("owner", ["run", 1]),
    ("owner", (b"run", 1)),
    ("owner", ("", 1)),
    ("owner", ("a run", 1)),
    ("owner", ("run\n", 1)),
    ("owner", ("r\u00fcn", 1)),
    ("owner", ("x" * 65, 1)),
    ("owner", ("run", -1)),
    ("owner", ("run", 1 << 31)),
    ("owner", ("run", True)),
    ("owner", ("run", 1.0)),
    ("owner", Ambiguous()),
    ("label", None),
    ("label", 5),
    ("label", b"bytes"),
    ("label", ["nightly"]),
    ("ssl_context", True),
    ("ssl_context", False),
    ("ssl_context", "context"),
    ("ssl_context", ssl.create_default_context),
    ("ssl_context", ssl.PROTOCOL_TLS_CLIENT),
    ("renew_ratio", "0.5"),
    ("renew_ratio", None),
    ("renew_ratio", b"0.5"),
    ("renew_ratio", [0.5]),
    ("renew_ratio", 0.5j),
    ("renew_ratio", Decimal("0.5")),
    ("renew_ratio", Ambiguous()),
    ("acquire_timeout_s", Decimal(1)),
    ("acquire_timeout_s", 1j),
    ("acquire_timeout_s", datetime.timedelta(seconds=1)),
    ("acquire_timeout_s", Ambiguous()),
    ("lease_ttl_s", Fraction(33)),
    ("lease_ttl_s", datetime.timedelta(seconds=33)),
    ("servers", {"a:1", "b:1"}),
    ("servers", frozenset({"a:1", "b:1"})),
    ("servers", {"a:1": 1, "b:1": 2}),
    ("servers", {"a:1": 1}.keys()),
    ("servers", "a:1"),
    ("servers", b"a:1"),
    ("servers", "cluster:/a:1"),
    ("servers", 5),
    ("servers", True),
    ("servers", object()),
    ("servers", ("a", 1)),
    ("servers", Ambiguous()),
    ("servers", (server for server in ())),
    ("servers", [{"localhost", 6388}]),
    ("servers", [{"localhost": 1, 6388: 2}]),
    ("servers", [("a", 1, 2)]),
    ("servers", [b"a:1"]),
    ("servers", [None]),
    ("servers", [("a", 65536)]),
    ("servers", ["a:99999"]),
    ("servers", [["a:1"]]),
    ("sharding_strategy", 5),
    ("sharding_strategy", None),
    ("sharding_strategy", "stable_hash_shard"),
    ("on_lost", 5),
    ("on_lost", "callback"),
    ("on_lost", []),
    ("auth_token", 5),
    ("auth_token", b"secret"),
    ("auth_token", ""),
    ("auth_token", True),
    ("key", b"key"),
    ("key", None),
    ("key", 5),
    ("key", pathlib.Path("key")),
    ("limit", True),
    ("limit", False),
    ("limit", 0),
    ("limit", "2"),
    ("limit", 1.0),
    ("limit", None),
    ("limit", Colour.RED),
    ("weight", True),
    ("weight", 1.0),
    ("weight", 0),
    ("weight", "1"),
    ("weight", None),
    ("weight", Ambiguous()),
]


@pytest.mark.parametrize(
    ("name", "value"), BAD, ids=[f"{name}-{type(value).__name__}" for name, value in BAD]
)
def test_refused_at_construction(face: Face, name: str, value: Any) -> None:
    expected = errors.InvalidKeyError if name == "key" else errors.InvalidArgumentError
    # The line names what is wrong; of the servers it may be one.
    words = {"servers": "server", "sharding_strategy": "sharding.strategy"}
    for kind in ["semaphore"] if name in ("limit", "weight") else ["lock", "semaphore"]:
        with pytest.raises(expected, match=words.get(name, name)) as caught:
            new(face, kind, **{name: value})
        checked(caught.value)


ENDLESS = ("x " * 10**5, ["x" * 10**5] * 10**3, 10**5000, dict.fromkeys(range(1000), "x" * 10**5))
"""Values that nobody would want to read, and one that Python refuses to write."""


@pytest.mark.parametrize("value", ENDLESS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", sorted({*dict(BAD), "group", "group_limit", "rate"}))
def test_a_value_is_shown_in_a_short_line(face: Face, name: str, value: Any) -> None:
    if name == "label" and isinstance(value, str):
        return  # it is cut
    options = {"group": "g"} if name == "group_limit" else {}
    kind = "semaphore" if name in ("limit", "weight") else "lock"
    with pytest.raises(errors.LocalError) as caught:
        new(face, kind, **options, **{name: value})
    checked(caught.value)


def test_what_is_secret_is_not_shown(face: Face) -> None:
    for secret in (b"open-sesame", ["open-sesame"], "open\nsesame"):
        with pytest.raises(errors.InvalidArgumentError) as caught:
            new(face, "lock", auth_token=secret)
        assert "sesame" not in str(caught.value)


NO_ORDER = ("set(NAMES)", "frozenset(NAMES)", "dict.fromkeys(set(NAMES))")


@pytest.mark.parametrize("hash_seeds", [4, more(20)])
def test_servers_in_no_order_are_not_spread_at_random(hash_seeds: int) -> None:
    """The order decides where a key lives: two processes must not have two orders."""
    program = f"""
from dflockd import client, sync_client
from dflockd.errors import InvalidArgumentError
NAMES = [f"lock-{{n}}:6388" for n in range(8)]
for servers in ({", ".join(NO_ORDER)}):
    for face in (client, sync_client):
        try:
            print(face.DistributedLock("key", servers=servers).server)
        except InvalidArgumentError:
            print("refused")
"""
    answers = set()
    for seed in range(hash_seeds):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        assert len(run.stdout.split()) == 2 * len(NO_ORDER)
        answers.add(run.stdout)
    assert len(answers) == 1, f"each process has another server in charge: {answers}"


# Properties: whatever it is, it is refused with an error of ours or it works.

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.decimals(),
    st.fractions(),
    st.text(st.characters(exclude_categories=[])),  # half surrogate pairs, too
    st.binary(),
    st.binary().map(bytearray),
    st.dates(),
    st.timedeltas(),
    st.sampled_from(
        [object(), Ambiguous(), Colour.RED, int, print, math, pathlib.Path("/tmp"), ..., range(3)]
    ),
)
HASHABLE = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary())
GARBAGE = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.sets(HASHABLE, max_size=3),
        st.frozensets(HASHABLE, max_size=3),
        st.dictionaries(HASHABLE, inner, max_size=3),
    ),
    max_leaves=5,
)
NUMBERS = st.one_of(
    st.integers(-5, 5),
    st.integers(2**31, 2**70),
    st.floats(-2, 2),
    st.sampled_from([5e-324, 0.999999999999999999, 1 - 2**-53, math.nan, math.inf, 1e300, -0.0]),
)
HOSTS = st.one_of(
    st.text(max_size=8),
    st.text("[]:.,/ab1 \n\0", max_size=8),
    st.tuples(st.one_of(st.text(max_size=8), GARBAGE), st.one_of(st.integers(), GARBAGE)),
    st.text(max_size=8).map("cluster://".__add__),
    st.text(max_size=8).map("unix:".__add__),
)

LIKELY = {
    "key": GARBAGE,
    "acquire_timeout_s": GARBAGE | NUMBERS,
    "lease_ttl_s": GARBAGE | NUMBERS,
    "servers": GARBAGE | HOSTS | st.lists(HOSTS, max_size=3) | st.sets(st.text(), max_size=3),
    # What is callable is the user's own program, and so are its exceptions.
    "sharding_strategy": GARBAGE.filter(lambda value: not callable(value))
    | GARBAGE.map(lambda value: lambda _key, _number: value),
    "renew_ratio": GARBAGE | NUMBERS,
    "auth_token": GARBAGE,
    "ssl_context": GARBAGE,
    "label": GARBAGE,
    "on_lost": GARBAGE,
    "limit": GARBAGE | NUMBERS,
    "weight": GARBAGE | NUMBERS,
}

many = settings(
    max_examples=settings.default.max_examples // 2,  # for each client: they share most of it
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", LIKELY)
def test_any_argument_is_refused_or_works(face: Face, scripted: ScriptedServer, name: str) -> None:
    kind = "semaphore" if name in ("limit", "weight") else "lock"
    servers = [("127.0.0.1", scripted.port)]

    @many
    @given(value=LIKELY[name])
    def check(value: Any) -> None:
        try:
            lock = new(face, kind, **{"servers": servers, name: value})
        except errors.LocalError as exc:
            checked(exc)
            return
        assert "\n" not in repr(lock)
        assert lock.held is False
        if name in ("servers", "sharding_strategy"):
            return  # there need be nobody there
        assert face.do(lock.acquire()) is True
        assert lock.held is True
        assert face.do(lock.release()) is True

    check()


METHODS: dict[str, Callable[[Any, Any], Any]] = {
    "enqueue": lambda lock, value: lock.enqueue(value),
    "adopt": lambda lock, value: lock.adopt(value),
    "evict": lambda lock, value: lock.evict(value),
    "pause": lambda lock, value: lock.pause(value),
    "pause-reason": lambda lock, value: lock.pause(reason=value),
    "pause-by": lambda lock, value: lock.pause(by=value),
    "wait": lambda lock, value: lock.wait(value),
    "wait-keep": lambda lock, value: lock.wait(0, value),
    "renew": lambda lock, value: lock.renew(value),
    "detach": lambda lock, value: lock.detach(value),
}
WHILE_HELD = ("renew", "detach")
WHILE_QUEUED = ("wait", "wait-keep")


@pytest.mark.parametrize("value", ENDLESS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", METHODS)
def test_a_value_that_a_method_is_given_is_shown_in_a_short_line(
    face: Face, scripted: ScriptedServer, name: str, value: Any
) -> None:
    scripted.script(Enqueue, Status.QUEUED)
    lock = face.module.DistributedLock("key", servers=[("127.0.0.1", scripted.port)])
    if name in WHILE_HELD:
        assert face.do(lock.acquire()) is True
    elif name in WHILE_QUEUED:
        assert face.do(lock.enqueue()) == "queued"
    with pytest.raises(errors.LocalError) as caught:
        face.do(METHODS[name](lock, value))
    checked(caught.value)
    face.do(lock.release())


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", METHODS)
def test_any_argument_of_a_method_is_refused_or_works(
    face: Face, scripted: ScriptedServer, name: str
) -> None:
    """And where it is refused, nothing has changed."""
    scripted.script(Enqueue, Status.QUEUED)
    scripted.script(Wait, Status.TIMEOUT)
    scripted.script(Evict, Status.OK)
    scripted.script(Pause, Status.OK)
    keep = st.tuples(NUMBERS | GARBAGE, NUMBERS | GARBAGE).map(
        lambda two: face.module.Reservation(*two)
    )
    likely = GARBAGE | NUMBERS | (keep if name == "wait-keep" else st.text("0aZ", max_size=40))

    @many
    @given(value=likely)
    def check(value: Any) -> None:
        lock = face.module.DistributedLock("key", servers=[("127.0.0.1", scripted.port)])
        if name in WHILE_HELD:
            assert face.do(lock.acquire()) is True
        elif name in WHILE_QUEUED:
            assert face.do(lock.enqueue()) == "queued"
        try:
            face.do(METHODS[name](lock, value))
        except errors.LocalError as exc:
            checked(exc)
            assert lock.held is (name in WHILE_HELD)
            if name in WHILE_QUEUED:
                assert face.do(lock.wait(0)) is False, "it has its place as before"
        finally:
            face.do(lock.release())

    check()
