"""Requests beside their bytes."""

from __future__ import annotations

from hypothesis import strategies as st

from dflockd.wire import (
    MAX_LIMIT,
    MAX_LINE,
    MAX_SECONDS,
    MAX_SECRET,
    Acquire,
    Auth,
    Barrier,
    Begun,
    Confirm,
    Detach,
    DrawAge,
    Enqueue,
    Evict,
    Find,
    FrameTooLongError,
    Identify,
    InGroup,
    Inspect,
    Label,
    Listen,
    Owner,
    Pass,
    Ping,
    Rate,
    Release,
    Renew,
    Request,
    RequestReader,
    Reserve,
    Resume,
    Shards,
    Space,
    StableRef,
    Stats,
    Turn,
    Unbegun,
    Wait,
)

LOCK, SEMAPHORE = Space.LOCK, Space.SEMAPHORE

TOKEN = b"0123456789abcdef0123456789abcdef"

# What is read from these bytes, and which bytes are sent for it.
FRAMES: list[tuple[bytes, Request]] = [
    (b"l\nk\n10\n", Acquire(LOCK, b"k", 1, 10, None)),
    (b"l\nk\n0 30\n", Acquire(LOCK, b"k", 1, 0, 30)),
    (b"sl\nk\n10 3\n", Acquire(SEMAPHORE, b"k", 3, 10, None)),
    (b"sl\nk\n10 3 30\n", Acquire(SEMAPHORE, b"k", 3, 10, 30)),
    (b"l\nk\n0 10/60000\n", Acquire(LOCK, b"k", 1, 0, None, Rate(10, 60_000))),
    (b"l\nk\n0 30 10/60000\n", Acquire(LOCK, b"k", 1, 0, 30, Rate(10, 60_000))),
    (b"sl\nk\n9 3 1048576/1\n", Acquire(SEMAPHORE, b"k", 3, 9, None, Rate(1 << 20, 1))),
    (b"sl\nk\n9 3 30 1/5\n", Acquire(SEMAPHORE, b"k", 3, 9, 30, Rate(1, 5))),
    (b"e\nk\n 10/60000\n", Enqueue(LOCK, b"k", 1, None, Rate(10, 60_000))),
    (b"e\nk\n30 10/60000\n", Enqueue(LOCK, b"k", 1, 30, Rate(10, 60_000))),
    (b"se\nk\n3 10/60000\n", Enqueue(SEMAPHORE, b"k", 3, None, Rate(10, 60_000))),
    (b"se\nk\n3 30 10/60000\n", Enqueue(SEMAPHORE, b"k", 3, 30, Rate(10, 60_000))),
    (b"begun\nk\nabc 60\n", Begun(LOCK, b"k", b"abc", 60)),
    (b"sbegun\nk\nabc\n", Begun(SEMAPHORE, b"k", b"abc", None)),
    (b"unbegun\nk\nabc\n", Unbegun(LOCK, b"k", b"abc")),
    (b"sunbegun\nk\nabc\n", Unbegun(SEMAPHORE, b"k", b"abc")),
    (b"r\nk\n" + TOKEN + b"\n", Release(LOCK, b"k", TOKEN)),
    (b"sr\nk\n" + TOKEN + b"\n", Release(SEMAPHORE, b"k", TOKEN)),
    (b"n\nk\n" + TOKEN + b"\n", Renew(LOCK, b"k", TOKEN, None)),
    (b"n\nk\n" + TOKEN + b" 60\n", Renew(LOCK, b"k", TOKEN, 60)),
    (b"sn\nk\n" + TOKEN + b"\n", Renew(SEMAPHORE, b"k", TOKEN, None)),
    (b"sn\nk\n" + TOKEN + b" 60\n", Renew(SEMAPHORE, b"k", TOKEN, 60)),
    (b"e\nk\n\n", Enqueue(LOCK, b"k", 1, None)),
    (b"e\nk\n30\n", Enqueue(LOCK, b"k", 1, 30)),
    (b"se\nk\n3\n", Enqueue(SEMAPHORE, b"k", 3, None)),
    (b"se\nk\n3 30\n", Enqueue(SEMAPHORE, b"k", 3, 30)),
    (b"w\nk\n10\n", Wait(LOCK, b"k", 10)),
    (b"sw\nk\n0\n", Wait(SEMAPHORE, b"k", 0)),
    (b"stats\n_\n_\n", Stats()),
    (b"auth\n_\nopen sesame\n", Auth(b"open sesame")),
    (b"ping\n_\n_\n", Ping()),
    (b"barrier\n_\n_\n", Barrier()),
    (b"stable-ref\npublisher-1\n_\n", StableRef(b"publisher-1")),
    ("label\n_\nsync é 7\n".encode(), Label("sync é 7".encode())),
    (b"label\n_\n\n", Label(b"")),
    (b"owner\n_\n_\n", Owner(b"", 0)),
    (b"owner\n_\nrun-7 0\n", Owner(b"run-7", 0)),
    (b"owner\n_\n_ 3 _\n", Owner(b"_", 3, b"_")),
    ("owner\nsync é 7\nrun-7 0\n".encode(), Owner(b"run-7", 0, b"", "sync é 7".encode())),
    (b"owner\n\nrun-7 0 i\n", Owner(b"run-7", 0, b"i", b"")),
    (b"owner\nme\n_\n", Owner(b"", 0, b"", b"me")),
    (b"owner\nme\nrun-7 0 i 1\n", Owner(b"run-7", 0, b"i", b"me", 1)),
    (b"owner\n_\nrun-7 2 i %d\n" % (2**64 - 1), Owner(b"run-7", 2, b"i", None, 2**64 - 1)),
    (
        b"owner\n_\n%b 2147483647 %b\n" % (b"r" * 64, b"i" * 64),
        Owner(b"r" * 64, 2147483647, b"i" * 64),
    ),
    (b"i\nk\n_\n", Inspect(LOCK, b"k")),
    (b"si\nk\n_\n", Inspect(SEMAPHORE, b"k")),
    (b"find\n_\nsync [3f\n", Find(b"sync [3f")),
    (b"find\nwaiters,all\n\n", Find(b"", waiters=True, notes=True)),
    (b"find\nall\nx\n", Find(b"x", notes=True)),
    (b"confirm\nk\nabc 60\n", Confirm(LOCK, b"k", b"abc", 60)),
    (b"sconfirm\nk\nabc\n", Confirm(SEMAPHORE, b"k", b"abc", None)),
    (b"detach\nk\nabc 60\n", Detach(LOCK, b"k", b"abc", 60)),
    (b"sdetach\nk\nabc\n", Detach(SEMAPHORE, b"k", b"abc", None)),
    (b"evict\nk\n18446744073709551615\n", Evict(LOCK, b"k", 2**64 - 1)),
    (b"sevict\nk\n1\n", Evict(SEMAPHORE, b"k", 1)),
    (b"shards\n_\n_\n", Shards()),
    (b"shards\n_\n_ zlib\n", Shards(packed=True)),
    (b"shards\n_\n0af3\n", Shards(b"0af3")),
    (b"shards\n_\n0af3 zlib\n", Shards(b"0af3", packed=True)),
    (b"identify\n_\n0aZ9\n", Identify(b"0aZ9")),
    (b"resume\n_\n0123456789abcdef\n", Resume(b"0123456789abcdef")),
    (b"group\ntenant:7\n_\n", InGroup(b"tenant:7")),
    ("group\ntenant:é\n3\n".encode(), InGroup("tenant:é".encode(), 3)),
    (b"group\n%b\n%d\n" % (b"g" * MAX_LINE, MAX_LIMIT), InGroup(b"g" * MAX_LINE, MAX_LIMIT)),
    (b"keep\n_\n1500 0\n", Reserve(1500, 0)),
    (b"keep\n_\n0 %d\n" % MAX_SECONDS, Reserve(0, MAX_SECONDS)),
    (b"turn\n_\n1500\n", Turn(1500)),
    (b"turn\n_\n0\n", Turn(0)),
    (b"age\nk\n_\n", DrawAge(b"k")),
    (b"listen\nk\n" + TOKEN + b"\n", Listen(b"k", TOKEN)),
    (b"pass\nk\n0aZ9\n", Pass(LOCK, b"k", b"0aZ9")),
    (b"spass\nk\n0aZ9\n", Pass(SEMAPHORE, b"k", b"0aZ9")),
]


def read(*pieces: bytes) -> tuple[list[Request], bool]:
    """Return what a reader makes of the pieces, and whether it gave up in the end."""
    reader = RequestReader()
    requests: list[Request] = []
    for piece in pieces:
        reader.receive(piece)
        try:
            while (request := reader.next_request()) is not None:
                requests.append(request)
        except FrameTooLongError:
            return requests, True
    return requests, False


text = st.binary(max_size=300).filter(lambda line: b"\n" not in line and not line.endswith(b"\r"))

# Bytes that get far into the parser: words of the format, and junk.
pieces = st.one_of(
    st.sampled_from([b"l", b"sl", b"r", b"n", b"e", b"se", b"w", b"sw", b"auth", b"i", b"label"]),
    st.sampled_from([b"owner\n_\n", b"run 1", b"owner"]),
    st.sampled_from([b"keep\n_\n", b"resume\n_\n", b"identify\n_\n", b"1 2\n"]),
    st.sampled_from(
        [b"turn\n_\n", b"pass", b"spass\nk\n", b"group\ng\n", b"begun\nk\n", b" 1/2", b"1/"]
    ),
    st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b"\r", b" ", b"\t", b"\0", b"0", b"1", b"33"]),
    st.sampled_from([b"k" * 255, b"k" * 256, b"k" * 257, b"s" * MAX_SECRET]),
    st.binary(max_size=8),
)
