"""Locks taken where other code was interrupted: signal handlers, finalisers, the end of a process.

A mutex that the interrupted code has would never be free: the process would hang. Each program ends
by itself, or is said to hang.
"""

from __future__ import annotations

import pytest

from tests import effort
from tests.dflockd.client.programs import run
from tests.dflockd.raw_server import ServerProcess

# One signal at a time, at a random instant of what the main thread does: with locks, or in the
# middle of a renewal. The next one comes once the handler is through with this one.
HANDLER = """
kept = []

def take_and_release():
    with lock("handler") as own:
        assert own.held

def take():
    kept.append(lock("kept", lease_ttl_s=1))
    assert kept[-1].acquire()

def release():
    assert kept.pop().release()

def forget():
    forgotten = lock("forgotten")
    assert forgotten.acquire()

def in_vain():
    assert not lock("busy", acquire_timeout_s=0).acquire()

def ask():
    assert lock("asked").inspect()["holders"] == []

def handle(*_):
    Count.number += 1
    if Count.number % 2 and kept:
        release()
    else:
        random.choice([take_and_release, forget, in_vain, ask] + ([] if kept else [take]))()
    if going_on():
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 0.002))

busy = lock("busy")
assert busy.acquire()
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.001)
"""


@effort.seconds
@pytest.mark.parametrize(
    "main",
    [
        pytest.param(
            """
while going_on():
    with lock("main") as mine:
        assert mine.held
""",
            id="blocks",
        ),
        pytest.param(
            """
# Enough renewals for the client's own thread to be met at work.
held = [lock(f"held-{n}", lease_ttl_s=1, renew_ratio=0.02) for n in range(50)]
for each in held:
    assert each.acquire()
while going_on():
    mine = lock("main", lease_ttl_s=1)
    assert mine.acquire() and mine.renew() and mine.release()
assert all(each.held for each in held)
for each in held:
    assert each.release()
""",
            id="renewals",
        ),
        pytest.param(
            """
def work(number):
    while going_on():
        with lock(f"thread-{number}") as mine:
            assert mine.held

threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
for thread in threads:
    thread.start()
while going_on():
    with lock("main") as mine:
        assert mine.held
for thread in threads:
    thread.join()
""",
            id="threads",
        ),
        pytest.param(
            """
async def main():
    while going_on():
        async with client.DistributedLock("main", **options) as mine:
            assert mine.held
        await asyncio.sleep(0)

asyncio.run(main())
""",
            id="asyncio",
        ),
    ],
)
def test_a_signal_handler_that_takes_locks(
    server: ServerProcess, main: str, seconds: float
) -> None:
    program = (
        HANDLER
        + main
        + """
signal.setitimer(signal.ITIMER_REAL, 0)
while kept:
    release()
assert busy.release()
print(Count.number)
"""
    )
    assert int(run(program, server, seconds=seconds)) > 50, "too few were interrupted"


@pytest.mark.parametrize("times", [4, effort.more(50)])
def test_a_signal_handler_that_ends_the_process(server: ServerProcess, times: int) -> None:
    """What is registered for the end, releases; whatever was interrupted."""
    program = """
held = lock("held")
assert held.acquire()

def finish():
    assert held.release()
    with lock("at-the-end") as last:
        assert last.held
    print("finished", flush=True)

def end(*_):
    sys.exit(0)

atexit.register(finish)
signal.signal(signal.SIGALRM, end)
signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.02))
while True:
    with lock("main") as mine:
        assert mine.held
"""
    for _ in range(times):
        assert run(program, server) == "finished\n"


# What the garbage collector ends, it ends in the middle of anything that makes an object.
GARBAGE = """
class Garbage:
    left = []  # an entry for each that is still to be finalised

    def __init__(self):
        self.itself = self
        self.left.append(None)

    def __del__(self):
        Count.number += 1
        try:
            self.finalise()
        finally:
            self.left.pop()

def collect():
    # `gc.collect` does nothing while another thread, the client's own say, is collecting.
    while Garbage.left:
        gc.collect()
        time.sleep(0.001)
"""

FINALISED = """
gc.set_threshold(int(sys.argv[2]))

class Owner(Garbage):
    def __init__(self):
        super().__init__()
        self.lock = lock(f"owned-{id(self)}")
        assert self.lock.acquire()

    def finalise(self):
        self.lock.release()  # it may be gone: they go in any order

class Keeper(Garbage):
    locks = {}

    def __init__(self):
        super().__init__()
        self.locks[id(self)] = lock(f"kept-{id(self)}")
        assert self.locks[id(self)].acquire()

    def finalise(self):
        assert self.locks.pop(id(self)).release()

class Taker(Garbage):
    def finalise(self):
        with lock(f"taker-{id(self)}") as own:
            assert own.held

class Forgetter:
    def __init__(self):
        self.itself = self
        self.lock = lock(f"forgotten-{id(self)}")
        assert self.lock.acquire()

class Watched:
    def __init__(self):
        self.itself = self
        watched.add(weakref.ref(self, gone))
        Garbage.left.append(None)

def gone(reference):
    watched.discard(reference)
    Count.number += 1
    try:
        with lock(f"watched-{id(reference)}") as own:
            assert own.held
    finally:
        Garbage.left.pop()

watched = set()

def litter():
    random.choice([Owner, Keeper, Taker, Forgetter, Watched])()

# A finaliser may run on the thread that renews, and keep it for as long as it takes to get a lock.
held = [lock(f"held-{n}", lease_ttl_s=6, renew_ratio=0.02) for n in range(20)]
for each in held:
    assert each.acquire()

def work(number):
    while going_on():
        litter()
        with lock(f"main-{number}") as mine:
            assert mine.held

threads = [threading.Thread(target=work, args=(n,)) for n in range(int(sys.argv[3]))]
for thread in threads:
    thread.start()
work("main")
for thread in threads:
    thread.join()
collect()
assert all(each.held for each in held)
for each in held:
    assert each.release()
print(Count.number)
"""


@effort.seconds
@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("threshold", [1, 17])
def test_finalisers_that_take_and_release(
    server: ServerProcess, threshold: int, threads: int, seconds: float
) -> None:
    finalised = run(GARBAGE + FINALISED, server, threshold, threads, seconds=seconds)
    assert int(finalised) > 50, "too few were finalised"


@pytest.mark.parametrize("times", [2, effort.more(30)])
@pytest.mark.parametrize("where", ["atexit", "finaliser", "thread", "weakref"])
def test_the_end_of_the_interpreter(server: ServerProcess, where: str, times: int) -> None:
    """Other threads stand still by then, the client's own too, with whatever is in their hands."""
    program = """
sys.setswitchinterval(1e-5)
# Renewed all the time.
held = [lock(f"held-{n}", lease_ttl_s=1, renew_ratio=0.005) for n in range(40)]
for each in held:
    assert each.acquire()

def work(number):
    while True:
        with lock(f"thread-{number}") as mine:
            assert mine.held

for n in range(3):
    threading.Thread(target=work, args=(n,), daemon=True).start()
time.sleep(random.uniform(0.15, 0.3))

def finish(*_, held=held, lock=lock):
    for each in held:
        each.release()
    for n in range(5):
        try:
            with lock("at-the-end") as last:
                assert last.held
        except RuntimeError:
            pass  # no thread can start any more, and that is said
    os.write(1, b"finished\\n")

class Finaliser:
    def __del__(self):
        finish()

where = sys.argv[2]
if where == "atexit":
    atexit.register(finish)
elif where == "thread":
    def wait(main=threading.main_thread()):
        main.join()
        finish()
    threading.Thread(target=wait).start()
else:
    # What stands still keeps the names of this module alive, not those of another.
    other = sys.modules["other"] = types.ModuleType("other")
    other.thing = Finaliser() if where == "finaliser" else type("Thing", (), {})()
    reference = weakref.ref(other.thing, finish) if where == "weakref" else None
    del other
print("ends", flush=True)
"""
    for _ in range(times):
        assert run(program, server, where, fresh=True) == "ends\nfinished\n"


@effort.seconds
@pytest.mark.parametrize("how", ["signal", "finaliser"])
def test_a_place_in_the_queue_given_up_in_between(
    server: ServerProcess, how: str, seconds: float
) -> None:
    """`enqueue`, `wait` and a release of the place, where somebody else was interrupted."""
    program = """
busy = lock("busy")
assert busy.acquire()

def queue():
    place = lock("busy")
    assert place.enqueue() == "queued"
    if random.random() < 0.5:
        assert place.wait(0) is False
    place.release()

class Queue(Garbage):
    def finalise(self):
        queue()

def handle(*_):
    Count.number += 1
    queue()
    if going_on():
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 0.002))

if sys.argv[2] == "signal":
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
else:
    gc.set_threshold(7)
while going_on():
    if sys.argv[2] == "finaliser":
        Queue()
    with lock("main") as mine:
        assert mine.held
signal.setitimer(signal.ITIMER_REAL, 0)
collect()
assert busy.release()
print(Count.number)
"""
    assert int(run(GARBAGE + program, server, how, seconds=seconds)) > 50


def test_on_lost_that_takes_locks(server: ServerProcess) -> None:
    """It runs on the client's own thread, which must not wait there for itself."""
    program = """
told = threading.Event()

def on_lost(one):
    with lock("from-on-lost", lease_ttl_s=1) as own:
        assert own.held
    forgotten = lock("forgotten")
    assert forgotten.acquire()
    del forgotten
    assert one.release() is False
    told.set()

one = lock("one", lease_ttl_s=1, on_lost=on_lost)
other = lock("other", lease_ttl_s=1)
assert one.acquire() and other.acquire()
assert lock("one").evict(one.fence)
assert told.wait(10)
time.sleep(1.5)
assert other.held and other.renew() and other.release()
"""
    assert run(program, server) == ""
