"""Requests beside their bytes."""

from __future__ import annotations

from hypothesis import strategies as st

from dflockd.wire import (
    ALL,
    MAX_AGE,
    MAX_ATTEMPT,
    MAX_LIMIT,
    MAX_LINE,
    MAX_OWNER,
    MAX_RATE,
    MAX_SECONDS,
    MAX_SECRET,
    Acquire,
    Auth,
    Barrier,
    DrawAge,
    Enqueue,
    Evict,
    FairGroup,
    Find,
    FrameTooLongError,
    Hello,
    How,
    Identify,
    Inspect,
    Listen,
    Owner,
    Pass,
    Pause,
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
    Unbegun,
    Wait,
)

LOCK, SEMAPHORE = Space.LOCK, Space.SEMAPHORE

TOKEN = b"0123456789abcdef0123456789abcdef"

ME = Owner(b"run-7", 2)

PAUSE = Pause(b"k", 500, b"ann@w1", b"the vendor = down")

# What is read from these bytes, and which bytes are sent for it.
FRAMES: list[tuple[bytes, Request]] = [
    # Published.
    (b"l\nk\n10\n", Acquire(LOCK, b"k", 1, 10, None)),
    (b"l\nk\n0 30\n", Acquire(LOCK, b"k", 1, 0, 30)),
    (b"sl\nk\n10 3\n", Acquire(SEMAPHORE, b"k", 3, 10, None)),
    (b"sl\nk\n10 3 30\n", Acquire(SEMAPHORE, b"k", 3, 10, 30)),
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
    # Of our own clients: hello.
    (b"hello\nhere\nversion=0.1.0\n", Hello(b"here", b"0.1.0")),
    (b"hello\nhere\nversion=1 secret=open sesame\n", Hello(b"here", b"1", b"open sesame")),
    (b"hello\nhere\nversion=1 secret=\n", Hello(b"here", b"1", b"")),
    (b"hello\nh\nversion=1 secret= a secret=b\n", Hello(b"h", b"1", b" a secret=b")),
    (
        b"hello\n%b\nversion=%b secret=%b\n" % (b"i" * MAX_OWNER, b"v" * 64, b"s" * MAX_SECRET),
        Hello(b"i" * MAX_OWNER, b"v" * 64, b"s" * MAX_SECRET),
    ),
    # acquire
    (b"acquire\nk\ntimeout=10 limit=3\n", Acquire(LOCK, b"k", 3, 10, None)),
    (b"acquire\nk\ntimeout=0 lease=30 label=me\n", Acquire(LOCK, b"k", 1, 0, 30, label=b"me")),
    (
        b"acquire\nk\ntimeout=0 rate=%d/%d\n" % (MAX_RATE, MAX_SECONDS),
        Acquire(LOCK, b"k", 1, 0, None, Rate(MAX_RATE, MAX_SECONDS)),
    ),
    (
        b"acquire\nk\ntimeout=%d limit=%d lease=%d\n" % (MAX_SECONDS, MAX_LIMIT, MAX_SECONDS),
        Acquire(LOCK, b"k", MAX_LIMIT, MAX_SECONDS, MAX_SECONDS),
    ),
    (b"acquire\nk\ntimeout=0 owner=run-7 attempt=2\n", Acquire(LOCK, b"k", 1, 0, None, owner=ME)),
    (
        b"acquire\nk\ntimeout=0 owner=%b attempt=%d age=%d\n"
        % (b"o" * MAX_OWNER, MAX_ATTEMPT, MAX_AGE),
        Acquire(LOCK, b"k", 1, 0, None, owner=Owner(b"o" * MAX_OWNER, MAX_ATTEMPT, MAX_AGE)),
    ),
    # One equals sign ends the name of a field.
    (
        b"acquire\nk\ntimeout=0 owner=a=b attempt=0\n",
        Acquire(LOCK, b"k", 1, 0, None, owner=Owner(b"a=b", 0)),
    ),
    (
        b"acquire\nk\ntimeout=0 group=tenant:7\n",
        Acquire(LOCK, b"k", 1, 0, None, group=FairGroup(b"tenant:7")),
    ),
    (
        b"acquire\nk\ntimeout=0 group=%b group-limit=%d\n" % (b"g" * MAX_LINE, MAX_LIMIT),
        Acquire(LOCK, b"k", 1, 0, None, group=FairGroup(b"g" * MAX_LINE, MAX_LIMIT)),
    ),
    (
        "acquire\nk\ntimeout=0 group=tenant:é group-limit=3\n".encode(),
        Acquire(LOCK, b"k", 1, 0, None, group=FairGroup("tenant:é".encode(), 3)),
    ),
    (
        b"acquire\nk\ntimeout=0 ticket=%b\n" % (b"0aZ9" * 16),
        Acquire(LOCK, b"k", 1, 0, None, ticket=b"0aZ9" * 16),
    ),
    (
        b"acquire\nk\ntimeout=9 away=1500 hold=0\n",
        Acquire(LOCK, b"k", 1, 9, None, reserve=Reserve(1500, 0)),
    ),
    (
        b"acquire\nk\ntimeout=0 away=0 hold=%d\n" % MAX_SECONDS,
        Acquire(LOCK, b"k", 1, 0, None, reserve=Reserve(0, MAX_SECONDS)),
    ),
    # A label goes on to the end of the line, whatever it says.
    (
        "acquire\nk\ntimeout=0 label=sync é 7 label= limit=3 timeout=\n".encode(),
        Acquire(LOCK, b"k", 1, 0, None, label="sync é 7 label= limit=3 timeout=".encode()),
    ),
    (
        b"acquire\nk\ntimeout=0 label=%b\n" % (b" " * MAX_LINE),
        Acquire(LOCK, b"k", 1, 0, None, label=b" " * MAX_LINE),
    ),
    (
        b"acquire\nk\ntimeout=0 limit=2 weight=%d\n" % MAX_LIMIT,
        Acquire(LOCK, b"k", 2, 0, None, group=FairGroup(b"", 0, ALL)),
    ),
    (
        b"acquire\nk\ntimeout=0 limit=9 group=g weight=2\n",
        Acquire(LOCK, b"k", 9, 0, None, group=FairGroup(b"g", 0, 2)),
    ),
    (
        b"acquire\nk\ntimeout=1 away=2 hold=3 limit=4 lease=5 rate=6/7 group=g group-limit=9 "
        b"weight=3 owner=run-7 attempt=2 age=8 ticket=0a label=me\n",
        Acquire(
            *(LOCK, b"k", 4, 1, 5, Rate(6, 7), Owner(b"run-7", 2, 8), b"me"),
            *(FairGroup(b"g", 9, 3), b"0a", Reserve(2, 3)),
        ),
    ),
    # enqueue
    (b"enqueue\nk\nlimit=3\n", Enqueue(LOCK, b"k", 3, None)),
    (b"enqueue\nk\nlabel=me\n", Enqueue(LOCK, b"k", 1, None, label=b"me")),
    (b"enqueue\nk\nturn=0\n", Enqueue(LOCK, b"k", 1, None, turn=0)),
    (
        b"enqueue\nk\nturn=%d lease=30 label=me\n" % MAX_SECONDS,
        Enqueue(LOCK, b"k", 1, 30, label=b"me", turn=MAX_SECONDS),
    ),
    (
        b"enqueue\nk\nturn=1 limit=4 lease=5 rate=6/7 group=g group-limit=9 "
        b"weight=3 owner=run-7 attempt=2 age=8 ticket=0a label=me\n",
        Enqueue(
            *(LOCK, b"k", 4, 5, Rate(6, 7), Owner(b"run-7", 2, 8), b"me", FairGroup(b"g", 9, 3)),
            *(b"0a", 1),
        ),
    ),
    # wait
    (b"wait\nk\ntimeout=10 age=7\n", Wait(LOCK, b"k", 10, None, 7)),
    (b"wait\nk\ntimeout=0 away=1500 hold=0\n", Wait(LOCK, b"k", 0, Reserve(1500, 0))),
    (
        b"wait\nk\ntimeout=0 away=1 hold=2 age=%d\n" % MAX_AGE,
        Wait(LOCK, b"k", 0, Reserve(1, 2), MAX_AGE),
    ),
    # renew
    (b"renew\nk\ntoken=abc how=begun\n", Renew(LOCK, b"k", b"abc", None, How.BEGUN)),
    (b"renew\nk\ntoken=abc how=confirm lease=60\n", Renew(LOCK, b"k", b"abc", 60, How.CONFIRM)),
    (b"renew\nk\ntoken=abc how=detach lease=60\n", Renew(LOCK, b"k", b"abc", 60, How.DETACH)),
    (b"renew\nk\ntoken=abc owner=run-7 attempt=2\n", Renew(LOCK, b"k", b"abc", None, owner=ME)),
    (
        b"renew\nk\ntoken=abc weight=2\n",
        Renew(LOCK, b"k", b"abc", None, group=FairGroup(b"", 0, 2)),
    ),
    (
        b"renew\nk\ntoken=abc how=begun lease=5 group=g group-limit=9 "
        b"weight=3 owner=run-7 attempt=2 age=8 label=me\n",
        Renew(
            *(LOCK, b"k", b"abc", 5, How.BEGUN, Owner(b"run-7", 2, 8), b"me"),
            *(FairGroup(b"g", 9, 3),),
        ),
    ),
    # The others
    (b"unbegun\nk\nabc\n", Unbegun(b"k", b"abc")),
    (b"pass\nk\n0aZ9\n", Pass(b"k", b"0aZ9")),
    (b"age\nk\n_\n", DrawAge(b"k")),
    (b"listen\nk\n" + TOKEN + b"\n", Listen(b"k", TOKEN)),
    (b"shards\n_\n_\n", Shards()),
    (b"shards\n_\n_ zlib\n", Shards(packed=True)),
    (b"shards\n_\n0af3\n", Shards(b"0af3")),
    (b"shards\n_\n0af3 zlib\n", Shards(b"0af3", packed=True)),
    (b"identify\n_\n0aZ9\n", Identify(b"0aZ9")),
    # Of operators.
    (b"i\nk\n_\n", Inspect(LOCK, b"k")),
    (b"si\nk\n_\n", Inspect(SEMAPHORE, b"k")),
    (b"find\n_\nsync [3f\n", Find(b"sync [3f")),
    (b"find\nwaiters,all\n\n", Find(b"", waiters=True, notes=True)),
    (b"find\nall\nx\n", Find(b"x", notes=True)),
    (b"evict\nk\n18446744073709551615\n", Evict(LOCK, b"k", 2**64 - 1)),
    (b"sevict\nk\n1\n", Evict(SEMAPHORE, b"k", 1)),
    (b"pause\nk\n\n", Pause(b"k")),
    (b"pause\nk\nfor=500 by=ann@w1 reason=the vendor = down\n", PAUSE),
    (b"pause\nk\nreason=for=1 by=me\n", Pause(b"k", reason=b"for=1 by=me")),
    (b"resume\nk\n_\n", Resume(b"k")),
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

# Fields by themselves: right ones, and ones with something wrong.
fields = st.sampled_from(
    [
        *(b"timeout=10", b"limit=3", b"lease=30", b"rate=10/60000", b"owner=run", b"attempt=1"),
        *(
            b"age=7",
            b"group=g",
            b"group-limit=2",
            b"weight=2",
            b"ticket=0a",
            b"turn=500",
            b"away=9",
            b"hold=9",
        ),
        *(b"token=abc", b"how=begun", b"how=detach", b"version=1", b"secret=a b", b"label=a b"),
        *(b"timeout=", b"limit=0", b"rate=1/", b"how=so", b"colour=red", b"=", b"=1", b"timeout"),
        *(b"for=500", b"by=ann", b"reason=a b", b"for=0", b"by=", b"reason=\xff"),
        *(b"label=", b"label=\xff", b"label=a\0b", b"label=%b" % (b"x" * (MAX_LINE + 1)), b"\t"),
        *(b"owner=%b" % (b"o" * (MAX_OWNER + 1)), b"ticket=%b" % (b"t" * 65), b"group=\xff", b""),
        *(b"owner=%b" % (b"o" * MAX_OWNER), b"group=%b" % (b"g" * (MAX_LINE + 1))),
    ]
)

named = st.builds(
    lambda command, key, found, gap: command + b"\n" + key + b"\n" + gap.join(found) + b"\n",
    st.sampled_from([b"acquire", b"enqueue", b"wait", b"renew", b"hello"]),
    st.sampled_from([b"k", b"k", b"here", b"", b"a b", b"\xff", b"k" * MAX_LINE]),
    st.lists(fields, max_size=8),
    st.sampled_from([b" ", b" ", b" ", b"  "]),
)
"""Whole requests with named fields."""

# Bytes that get far into the parser: words of the format, and junk.
pieces = st.one_of(
    st.sampled_from([b"l", b"sl", b"r", b"n", b"e", b"se", b"w", b"sw", b"auth", b"i"]),
    st.sampled_from([b"acquire\nk\n", b"enqueue\nk\n", b"wait\nk\n", b"renew\nk\n", b"hello\nk\n"]),
    st.sampled_from([b"pass", b"unbegun\nk\n", b"identify\n_\n", b"1 2\n", b" 1/2", b"age"]),
    st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b"\r", b" ", b"\t", b"\0", b"0", b"1", b"33"]),
    st.sampled_from([b"k" * 255, b"k" * 256, b"k" * 257, b"s" * MAX_SECRET]),
    st.sampled_from([b"f" * 1023, b"f" * 1024, b"f" * 1025, b" secret=", b" label=", b" limit=3"]),
    fields,
    named,
    st.binary(max_size=8),
)
