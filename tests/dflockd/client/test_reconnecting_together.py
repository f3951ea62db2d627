"""Many locks of one process, and a server that is gone: they do not all run at it."""

from __future__ import annotations

import socket
import threading
import time

from dflockd import sync_client
from tests.dflockd.raw_server import ServerProcess

LOCKS = 200
SECONDS = 2.0


class Refusing:
    """Hangs up on whoever connects, and counts them."""

    def __init__(self, port: int) -> None:
        self.count = 0
        self._listener = socket.create_server(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.close()
            self.count += 1

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


def test_one_finds_out_for_all_whether_a_server_is_back() -> None:
    server = ServerProcess()
    servers = [("127.0.0.1", server.port)]
    locks = [sync_client.DistributedLock(f"crowd-{n}", servers=servers) for n in range(LOCKS)]
    for lock in locks:
        assert lock.acquire()
    server.signal(9)
    server.end()
    # Half of them are sought by those who hold them, the others are to be released.
    for lock in locks[: LOCKS // 2]:
        lock.release()
    crowd = Refusing(server.port)
    try:
        time.sleep(SECONDS)
        # Each by itself would come five times a second; each may come once in three seconds.
        assert crowd.count < LOCKS * 1.5, "they run at it"
        assert threading.active_count() < 20
    finally:
        crowd.close()
        for lock in locks:
            lock._session.abandon()
