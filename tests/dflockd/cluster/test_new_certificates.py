"""All servers get new certificates, one server after the other, while locks are held and asked for."""

from __future__ import annotations

import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dflockd.sync_client import DistributedLock
from tests.dflockd.cluster.stage import ClusterStage, FewShards
from tests.dflockd.shards.certificates import Authority
from tests.dflockd.shards.test_etcd_tls import TlsEtcd, trust

LEASE = 8
KEYS = 4
USERS = 8
USE = 0.002
"""Seconds, so that a second one would be noticed."""


class Account:
    """Something that one at a time may use."""

    def __init__(self) -> None:
        self.used = 0
        self.fence = 0
        self.wrong: list[str] = []
        self._in_use = threading.Lock()

    def use(self, lock: DistributedLock) -> None:
        if not self._in_use.acquire(blocking=False):
            self.wrong.append(f"two at once use {lock.key}")
            return
        assert lock.fence is not None
        if lock.fence <= self.fence:
            self.wrong.append(f"fence {lock.fence} of {lock.key} after {self.fence}")
        self.fence = lock.fence
        self.used += 1
        time.sleep(USE)
        self._in_use.release()


def test_a_roll_of_all_servers_with_new_certificates_loses_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    for name in ("client", "server"):
        authority.sign(name)
    trust(authority)
    ca = authority.path("ca.pem")
    arguments = [
        *("--default-lease-ttl", str(LEASE)),
        *("--tls-cert", authority.path("server.pem"), "--tls-key", authority.path("server.key")),
        *("--cluster-ca", ca, "--cluster-cert", authority.path("client.pem")),
        *("--cluster-key", authority.path("client.key")),
    ]
    trusted = ssl.create_default_context(cafile=ca)
    accounts = [Account() for _ in range(KEYS)]
    lost: list[str] = []
    over = threading.Event()

    with (
        TlsEtcd(tmp_path) as etcd,
        ClusterStage(
            tmp_path, etcd, *arguments, serving_lease=2, max_lease=LEASE, kind=FewShards
        ) as cluster,
        ThreadPoolExecutor(USERS) as pool,
    ):

        def lock_of(key: str) -> DistributedLock:
            return DistributedLock(
                key,
                None,
                LEASE,
                cluster.address,
                ssl_context=trusted,
                on_lost=lambda lock: lost.append(lock.key),
            )

        def contend(number: int) -> None:
            while not over.is_set():
                for key in range(KEYS):
                    with lock_of(f"account-{(key + number) % KEYS}") as lock:
                        accounts[(key + number) % KEYS].use(lock)

        kept = [lock_of(f"kept-{number}") for number in range(20)]
        for lock in kept:
            assert lock.acquire()
        users = [pool.submit(contend, number) for number in range(USERS)]
        try:
            for server in cluster.servers:
                before = [account.used for account in accounts]
                for name in ("client", "server"):
                    authority.sign(name)
                server.stop()
                server.start()
                server.wait_joined()
                assert "not every shard was handed over" not in server.log.read_text()
                while any(a.used <= b for a, b in zip(accounts, before, strict=True)):
                    done = [user for user in users if user.done()]
                    assert not done, [user.exception() for user in done]
                    over.wait(0.05)
        finally:
            over.set()
        for user in users:
            user.result()
        assert [account.wrong for account in accounts] == [[]] * KEYS
        assert not lost
        for lock in kept:
            assert [each["fence"] for each in lock.inspect()["holders"]] == [lock.fence]
            lock.release()  # whether that is told within a second depends on the machine
