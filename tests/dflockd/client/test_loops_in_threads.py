"""A loop in each of many threads: they come and go, and what one leaves behind is nothing to others."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflockd import errors
from tests import effort
from tests.dflockd.client.loops import LoopThread, NewLoop, acquire, lock_on, release, run_alone
from tests.dflockd.client_support import is_free, renewed, until
from tests.dflockd.raw_server import ServerProcess, eventually

pytestmark = [
    # Where the warning of a transport that is left is an error, uvloop hangs as it closes, and no
    # signal interrupts that.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.timeout(60, method="thread"),
]


@effort.seconds
@pytest.mark.parametrize("how", ["run", "bare"])
def test_a_loop_in_every_thread(
    server: ServerProcess, new_loop: NewLoop, key: str, how: str, seconds: float
) -> None:
    """They come and go; what one leaves behind is nothing to the others."""
    failed: list[BaseException] = []
    entered = [0]
    inside: list[int] = []
    end = time.monotonic() + seconds

    async def main(number: int) -> None:
        async with lock_on(server, f"{key}-{number % 4}", lease_ttl_s=20):
            inside.append(number)
            assert [n % 4 for n in list(inside)].count(number % 4) == 1
            entered[0] += 1
            inside.remove(number)

    def work(number: int) -> None:
        try:
            while (time.monotonic() < end or entered[0] <= 50) and not failed:
                if how == "run":
                    run_alone(new_loop, main(number))
                    continue
                loop = new_loop()
                try:
                    loop.run_until_complete(main(number))
                finally:
                    loop.close()
        except BaseException as exc:
            failed.append(exc)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(before)
    assert not failed, [repr(exc) for exc in failed]
    assert entered[0] > 50
    eventually(lambda: all(is_free(server, f"{key}-{n}") for n in range(4)))


def test_one_object_for_the_loops_of_many_threads(
    server: ServerProcess, new_loop: NewLoop, key: str
) -> None:
    """One of them has it, and the others are told."""
    lock = lock_on(server, key, lease_ttl_s=20)
    now, overlaps, entries = [0], [0], [0]

    async def main() -> None:
        for _ in range(50):
            try:
                async with lock:
                    now[0] += 1
                    entries[0] += 1
                    overlaps[0] += now[0] > 1
                    await asyncio.sleep(0.0005)
                    now[0] -= 1
            except errors.AlreadyHeldError:
                await asyncio.sleep(0)

    with ThreadPoolExecutor(4) as executor:
        results = [executor.submit(run_alone, new_loop, main()) for _ in range(4)]
        for result in results:
            result.result(30)
    assert overlaps[0] == 0, f"{overlaps[0]} of {entries[0]}"
    assert entries[0]
    assert is_free(server, key)


async def test_one_loop_waits_for_the_lock_of_another(
    server: ServerProcess, start_loop: Callable[..., LoopThread], key: str
) -> None:
    lock = lock_on(server, key)
    other = start_loop()
    assert other.run(acquire(lock)) is True
    waiting = asyncio.ensure_future(lock_on(server, key).acquire())
    await renewed(server, key)
    assert not waiting.done()
    assert await asyncio.to_thread(other.run, release(lock)) is True
    await until(waiting.done)
    assert waiting.result() is True
