"""A real etcd of several members, each of which can be killed, stopped and started."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from examples.demo.stage import WAIT, wait_until
from tests.dflockd.cluster.stage import free_port
from tests.dflockd.shards.etcd_process import Etcd, etcd_executable


class EtcdMember(Etcd):
    """One of them."""

    def __init__(
        self, directory: str | Path, name: str, cluster: EtcdCluster, *, more: Sequence[str] = ()
    ) -> None:
        super().__init__(directory, name, more=more)
        self.port = free_port()
        self.peer_port = free_port()
        self.peer_way = self.peer_port
        """The port at which the others reach it."""
        self._cluster = cluster

    def _command(self) -> Sequence[str]:
        here = f"{self.scheme}://{self.endpoint}"
        options = {
            "--name": self.name,
            "--data-dir": str(self.data),
            "--listen-client-urls": here,
            "--advertise-client-urls": here,
            "--listen-peer-urls": f"http://127.0.0.1:{self.peer_port}",
            "--initial-advertise-peer-urls": f"http://127.0.0.1:{self.peer_way}",
            "--initial-cluster": ",".join(
                f"{member.name}=http://127.0.0.1:{member.peer_way}"
                for member in self._cluster.members
            ),
            "--heartbeat-interval": "50",
            "--election-timeout": "500",
        }
        words = (word for option in options.items() for word in option)
        return [etcd_executable(), *words, "--unsafe-no-fsync", *self._more]


class EtcdCluster:
    """The members, as one etcd."""

    def __init__(
        self,
        directory: str | Path,
        number: int = 3,
        *,
        more: Sequence[str] = (),
        name: str = "etcd",
    ) -> None:
        self.members: list[EtcdMember] = []
        for index in range(number):
            self.members.append(EtcdMember(directory, f"{name}-{index}", self, more=more))

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def endpoint(self) -> str:
        """All of them, as a URL has them."""
        return ",".join(member.endpoint for member in self.members)

    def start(self) -> None:
        """Start those that do not run, together: none serves without the others."""
        missing = [member for member in self.members if not member.running]
        with ThreadPoolExecutor(len(self.members)) as pool:
            list(pool.map(EtcdMember.start, missing))

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def stop(self) -> None:
        with ThreadPoolExecutor(len(self.members)) as pool:
            list(pool.map(EtcdMember.stop, self.members))

    def pause(self) -> None:
        for member in self.members:
            member.pause()

    def resume(self) -> None:
        for member in self.members:
            os.kill(member.pid, signal.SIGCONT)

    def control(self, *words: str) -> Any:
        return self.members[0].control(*words)

    def calls(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for member in self.members:
            counts += member.calls()
        return counts

    @property
    def leader(self) -> EtcdMember:
        """The one that leads, as soon as there is one."""

        def probe() -> EtcdMember | None:
            for member in self.members:
                if member.running:
                    [status] = member.control("endpoint", "status")
                    if status["Status"]["leader"] == status["Status"]["header"]["member_id"]:
                        return member
            return None

        return wait_until(probe, WAIT, lambda: "no member leads")
