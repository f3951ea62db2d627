"""Takes locks of a cluster, with the client of whatever release is on the path, until its input ends.

`python -m tests.celery_dflock.upgrade.cluster_user cluster://...` prints how many it has got, and
everything that went wrong.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time

from dflockd.sync_client import DistributedLock, DistributedSemaphore

THREADS = 6
KEYS = 4


class User:
    def __init__(self, servers: str) -> None:
        self._servers = servers
        self._is_over = threading.Event()
        self._fences: dict[str, int] = {}
        self.granted = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self._is_over.is_set():
            key = f"key-{random.randrange(KEYS)}"
            try:
                if random.random() < 0.3:
                    with DistributedSemaphore(
                        key, limit=2, acquire_timeout_s=30, servers=self._servers
                    ):
                        time.sleep(0.01)
                else:
                    with DistributedLock(key, acquire_timeout_s=30, servers=self._servers) as lock:
                        self._look(lock)
            except Exception as exc:
                self.wrong.append(f"{key}: {type(exc).__name__}: {exc}")
            self.granted += 1

    def _look(self, lock: DistributedLock) -> None:
        fence, before = lock.fence or 0, self._fences.get(lock.key, 0)
        if fence <= before:
            self.wrong.append(f"{lock.key}: fence {fence} after {before}")
        self._fences[lock.key] = fence
        time.sleep(0.01)
        if not lock.held:
            self.wrong.append(f"{lock.key}: lost with fence {fence}")

    def end(self) -> None:
        self._is_over.set()


def main() -> None:
    user = User(sys.argv[1])
    threads = [threading.Thread(target=user.run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    user.end()
    for thread in threads:
        thread.join()
    print(json.dumps({"granted": user.granted, "wrong": user.wrong}))


if __name__ == "__main__":
    main()
