"""The driver: starts everything, does the damage, waits until all is quiet, and has it judged."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from dflockd.table.sharded import RESUME_TIMEOUT
from examples.demo.stage import Process, Redis, StageError, Worker
from tests.chaos import jobs, timeline
from tests.chaos.checker import check
from tests.chaos.cluster import ClusterOfServers
from tests.chaos.damage import QUIET, Damage
from tests.chaos.faults import KINDS, UNSETTLING, Fault, recovery, schedule
from tests.chaos.history import Recorder, now, read
from tests.chaos.network import Network
from tests.chaos.options import HISTORY, Options
from tests.chaos.outcome import Outcome
from tests.chaos.processes import Client, Finished, Sender, Server

MOVING = ("cluster-move", "cluster-rebalance", "cluster-join", "server-restart")
DELAYING = ("client-stop", "worker-stop", *(f"link-{kind}" for kind in KINDS["link"]))
MOVED = RESUME_TIMEOUT + 2
"""Seconds in which shards have moved and those who wait have followed, or lost their places."""

UNSETTLED_STEP = 0.25
"""Seconds between the breaks that are noted while that can be so."""

RIGHT = ("no lock is granted or renewed until it does", "does not lead here: no answer")
"""What a server rightly says that is cut off from etcd, or by whose link nothing comes."""


def run(options: Options) -> Outcome:
    """Do it all; a StageError if something could not be started."""
    options.directory.mkdir(parents=True, exist_ok=True)
    if (options.directory / HISTORY).exists():
        raise StageError(
            f"{options.directory} has the history of another run: name a new directory"
        )
    with contextlib.ExitStack() as opened:
        stage = _Stage(options, opened)
        stage.torment()
        stage.settle()
    events = read(options.directory / HISTORY)
    outcome = Outcome(options, events, check(events), stage.complaints())
    if outcome.first is not None:
        picture = timeline.pictures(events, outcome.first)[1]
        (options.directory / "violation.svg").write_text(picture)
    return outcome


class _Stage:
    """Everything that runs, and what can be done to it."""

    def __init__(self, options: Options, opened: contextlib.ExitStack) -> None:
        self._options = options
        self._recorder = Recorder(options.directory / HISTORY)
        opened.callback(self._recorder.close)
        self._failed: list[BaseException] = []
        self._complaints: list[str] = []
        self._over = threading.Event()
        opened.callback(self._over.set)
        self._targets: dict[str, Any] = {}
        self._moved_at = self._late_until = 0.0

        network = Network()
        opened.callback(network.close)
        self._cluster: ClusterOfServers | None = None
        if options.parameters is None:
            ways = self._lone_servers(network, opened)
        else:
            self._cluster = ClusterOfServers(options, options.parameters, network, opened)
            ways = self._clustered_servers(self._cluster)
        self._damage = Damage(
            self._recorder, self._over, self._cluster, self._unsettle, self._complaints
        )
        self._workers: list[Worker] = []
        self._sender: Sender | None = None
        if options.workers:
            redis = opened.enter_context(Redis(options.directory))
            for number in range(options.workers):
                worker = self._worker(number, redis.url, ways[number % 2])
                self._workers.append(self._add(f"worker-{number}", opened.enter_context(worker)))
            for worker in self._workers:
                worker.wait_ready(QUIET)
            self._sender = opened.enter_context(Sender(options, self._env(redis.url, ways[0])))
        self._clients = [
            self._add(
                f"client-{number}", opened.enter_context(Client(options, number, ways[number % 2]))
            )
            for number in range(options.clients)
        ]

    def _lone_servers(self, network: Network, opened: contextlib.ExitStack) -> list[str]:
        """Start servers that know nothing of each other; return the two ways to them."""
        options = self._options
        servers = [
            self._add(f"server-{number}", opened.enter_context(Server(options, number)))
            for number in range(options.servers)
        ]
        # Half of the users go through one link to each server, the others through another.
        ways = []
        for half in range(2):
            links = [network.link(server.port) for server in servers]
            for link in links:
                opened.callback(link.close)
                self._add(f"link-{half * len(servers) + links.index(link)}", link)
            ways.append(",".join(f"127.0.0.1:{link.port}" for link in links))
        return ways

    def _clustered_servers(self, cluster: ClusterOfServers) -> list[str]:
        for number, server in enumerate(cluster.servers):
            self._add(f"server-{number}", server)
            self._add(f"link-{number}", cluster.links[number])
            self._add(f"tie-{number}", cluster.ties[number])
        for number, member in enumerate(cluster.members):
            self._add(f"etcd-{number}", member)
        for number, peer in enumerate(cluster.peers):
            self._add(f"peer-{number}", peer)
        self._add("cluster-0", cluster)
        return [cluster.address] * 2

    def _add(self, name: str, target: Any) -> Any:
        self._targets[name] = target
        return target

    def _worker(self, number: int, broker: str, servers: str) -> Worker:
        name, env = f"worker-{number}", self._env(broker, servers)
        return Worker(self._options.directory, app="tests.chaos.jobs", name=name, env=env)

    def _env(self, broker: str, servers: str) -> dict[str, str]:
        return {
            jobs.BROKER: broker,
            jobs.DIRECTORY: str(self._options.directory),
            jobs.LEASE: str(self._options.lease),
            jobs.WAIT: self._options.wait,
            "DFLOCK_SERVERS": servers,
        }

    # While it lasts.

    def torment(self) -> None:
        """Let the faults happen."""
        options = self._options
        faults = schedule(
            options.seed,
            list(self._targets),
            options.faults,
            options.seconds,
            options.pace,
            options.lease,
            options.parameters,
        )
        began = time.monotonic()
        threads = [
            threading.Thread(target=self._guarded, args=(self._suffer, mine, began))
            for mine in faults.values()
            if mine
        ]
        for thread in threads:
            thread.start()
        self._over.wait(options.seconds)
        for thread in threads:
            thread.join()
        if self._failed:
            raise self._failed[0]

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except BaseException as exc:
            self._failed.append(exc)
            self._over.set()

    def _suffer(self, faults: Sequence[Fault], began: float) -> None:
        for fault in faults:
            if self._over.wait(max(0.0, began + fault.at - time.monotonic())):
                return
            target = self._targets[fault.target]
            self._recorder.note(
                "fault",
                detail=f"{fault.name} {fault.target}",
                until=now() + round(fault.seconds * 1e9),
                group=target.pid if isinstance(target, Process) else 0,
            )
            self._unsettle(fault)
            self._damage.do(fault, target)

    def _unsettle(self, fault: Fault) -> None:
        """Note when places in queues of a cluster can be lost.

        They do not outlive a server that the others take for dead. They move with their shards, but
        not if who waits cannot be there in time.
        """
        parameters = self._options.parameters
        if parameters is None:
            return
        if fault.name in MOVING:
            self._moved_at = time.monotonic()
        is_late = fault.name in DELAYING
        if (is_late and time.monotonic() < self._moved_at + MOVED) or (
            fault.name in MOVING and time.monotonic() < self._late_until
        ):
            self._recorder.note("broken", detail=fault.target)
        if is_late:
            self._late_until = max(self._late_until, time.monotonic() + fault.seconds)
        if fault.name not in UNSETTLING:
            return
        began = now()
        for step in range(math.ceil((fault.seconds + recovery(parameters)) / UNSETTLED_STEP)):
            at = began + round(step * UNSETTLED_STEP * 1e9)
            self._recorder.note("broken", at=at, detail=fault.target)

    # When it is over.

    def settle(self) -> None:
        """Let everybody come to an end: who does not is lost, and the checker says so."""
        ends = time.monotonic() + QUIET
        for client in self._clients:
            os.kill(client.pid, signal.SIGTERM)
        for client in self._clients:
            while client.running and time.monotonic() < ends:
                time.sleep(0.01)
            if client.running:
                self._complaints.append(f"{client.name} did not end within {QUIET:g} s of SIGTERM")
        if self._sender is not None:
            self._sender.stop(QUIET)
            path = self._options.directory / HISTORY
            sent, finished = {e.task for e in read(path) if e.what == "sent"}, Finished(path)
            while sent - finished.tasks() and time.monotonic() < ends:
                time.sleep(0.1)
        for worker in self._workers:
            self._damage.end(worker)
        for server in self._servers():
            if server.running:
                server.stop(QUIET)

    def complaints(self) -> list[str]:
        """Who did not end, and lines of the servers' logs that tell of a fault of theirs."""
        return self._complaints + [
            f"{server.log}: {line}"
            for server in self._servers()
            if server.log.exists()
            for line in server.log.read_text(errors="replace").splitlines()
            if "Traceback" in line
            or (" ERROR " in line and not any(text in line for text in RIGHT))
        ]

    def _servers(self) -> list[Server]:
        named = [target for name, target in self._targets.items() if name.startswith("server-")]
        return named if self._cluster is None else [*named, self._cluster.spare]
