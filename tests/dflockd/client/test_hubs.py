"""gevent and eventlet with native threads beside the greenlets: each thread has a hub of its own."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.dflockd.client_support import Script
from tests.dflockd.raw_server import ServerProcess

PROGRAM = """
import sys

library, port = sys.argv[1], int(sys.argv[2])
if library == "gevent":
    from gevent import monkey
    monkey.patch_all()
    import gevent
    def in_thread(work):
        return gevent.get_hub().threadpool.apply(work)
    def end_threads():
        gevent.get_hub().threadpool.kill()
else:
    import eventlet
    eventlet.monkey_patch()
    from eventlet import tpool
    def in_thread(work):
        return tpool.execute(work)
    end_threads = tpool.killall

import time
from dflockd.sync_client import DistributedLock

options = {"servers": [("127.0.0.1", port)], "acquire_timeout_s": 5}
often = {"lease_ttl_s": 600, "renew_ratio": 0.0002}

def renewed(lock):
    before, until = lock._session.lease.deadline, time.monotonic() + 10
    while lock._session.lease.deadline <= before:
        assert time.monotonic() < until, "it is not renewed"
        time.sleep(0.01)

def hold(key):
    with DistributedLock(key, **options, **often) as lock:
        renewed(lock)
    return "renewed"

print("in a thread:", in_thread(lambda: hold("thread")))  # the first one of the process

lost = []
lock = DistributedLock("main", on_lost=lost.append, **options, **often)
with lock:
    renewed(lock)
    print("meanwhile:", in_thread(lambda: hold("thread")))
    assert lock.renew()
    DistributedLock("main", **options).evict(lock.fence)
    until = time.monotonic() + 10
    while not lost:
        assert time.monotonic() < until, "nobody is told of the loss"
        time.sleep(0.01)

# Taken in a thread, and given back here.
moved = DistributedLock("moved", **options, **often)
assert in_thread(moved.acquire)
assert moved.release()

end_threads()
print("afterwards:", hold("main"))
print("done", flush=True)
"""


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_native_threads_beside_greenlets(server: ServerProcess, library: str) -> None:
    pytest.importorskip(library)
    with closing(Script(PROGRAM, library, server.port, fresh=True)) as script:
        assert script.line() == "in a thread: renewed"
        assert script.line() == "meanwhile: renewed"
        assert script.line() == "afterwards: renewed"
        assert script.line() == "done"
