"""The damage: what each fault does to what it hits."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from examples.demo.stage import Process, StageError, Worker
from tests.chaos.cluster import ClusterOfServers, Ties
from tests.chaos.faults import Fault
from tests.chaos.history import Recorder, now
from tests.chaos.network import Link, Way
from tests.chaos.processes import Server, stop_for
from tests.dflockd.shards.etcd_process import Etcd

QUIET = 120.0
"""Seconds that everything may take to come to its end once the faults are over."""

WARM = 60.0
"""Seconds that a worker may take to end after SIGTERM.

Mostly it takes two. But its children wait up to 30 s for a main process that has stopped listening
to them (billiard's `Worker._ensure_messages_consumed`), with locks or without.
"""

STARTS = 5
"""Attempts to start a server: its port may have gone to somebody's outgoing connection."""


class Damage:
    """Does what a fault says, and notes what nobody can be sure of meanwhile.

    Args:
        recorder: where it is noted.
        over: set when the run ends before its time.
        cluster: of the lock servers, if they are one.
        unsettle: notes when places in queues of a cluster can be lost.
        complaints: gets a line for what did not go as it should.
    """

    def __init__(
        self,
        recorder: Recorder,
        over: threading.Event,
        cluster: ClusterOfServers | None,
        unsettle: Callable[[Fault], None],
        complaints: list[str],
    ) -> None:
        self._recorder = recorder
        self._over = over
        self._cluster = cluster
        self._unsettle = unsettle
        self._complaints = complaints

    def do(self, fault: Fault, target: Any) -> None:
        getattr(self, f"_{fault.name.replace('-', '_')}")(target, fault)

    def _server_kill(self, server: Server, fault: Fault) -> None:
        self._recorder.note("broken", detail=fault.target)
        server.kill()
        self._start_again(server, fault)

    def _server_restart(self, server: Server, fault: Fault) -> None:
        self._recorder.note("broken", detail=fault.target)
        server.stop()
        self._start_again(server, fault)

    def _server_step(self, server: Server, fault: Fault) -> None:
        server.step = (fault.choice - 0.5) * 7200
        self._server_kill(server, fault)

    def _server_shift(self, server: Server, fault: Fault) -> None:
        server.shift = round((fault.choice - 0.5) * 2000)
        self._server_kill(server, fault)

    def _start_again(self, server: Server, fault: Fault) -> None:
        time.sleep(fault.seconds)
        for attempt in range(1, STARTS + 1):
            at = now()
            try:
                server.start()
                break
            except StageError:
                if attempt == STARTS:
                    raise
        self._recorder.note("restarted", at=at, until=now(), detail=fault.target)
        # Whatever was broken is known to be by now.
        self._recorder.note("broken", detail=fault.target)

    def _server_stop(self, server: Server, fault: Fault) -> None:
        stop_for(server, fault.seconds)

    def _etcd_stop(self, etcd: Etcd, fault: Fault) -> None:
        stop_for(etcd, fault.seconds)

    def _etcd_restart(self, etcd: Etcd, fault: Fault) -> None:
        etcd.stop()
        time.sleep(fault.seconds)
        etcd.start()

    def _etcd_kill(self, etcd: Etcd, fault: Fault) -> None:
        etcd.kill()
        time.sleep(fault.seconds)
        etcd.start()

    def _etcd_full(self, _etcd: Etcd, fault: Fault) -> None:
        assert self._cluster is not None
        try:
            self._cluster.fill()
            time.sleep(fault.seconds)
        finally:
            self._cluster.make_room()

    def _client_kill(self, client: Process, fault: Fault) -> None:
        with self._death(group=client.pid):
            client.kill()
        time.sleep(fault.seconds)
        client.start()

    def _client_restart(self, client: Process, fault: Fault) -> None:
        client.stop(QUIET)  # after its section, which may be long, and answers that do not come
        time.sleep(fault.seconds)
        client.start()

    def _client_stop(self, client: Process, fault: Fault) -> None:
        stop_for(client, fault.seconds)

    def _worker_kill(self, worker: Worker, fault: Fault) -> None:
        self._client_kill(worker, fault)
        worker.wait_ready(QUIET)

    def _worker_restart(self, worker: Worker, fault: Fault) -> None:
        self.end(worker)
        time.sleep(fault.seconds)
        worker.start()
        worker.wait_ready(QUIET)

    def end(self, worker: Worker) -> None:
        """SIGTERM; who does not heed it is complained of, with what its threads did, and killed."""
        self._recorder.note("stopping", pid=worker.pid, group=worker.pid)
        os.kill(worker.pid, signal.SIGTERM)
        ends = time.monotonic() + WARM
        while worker.running and time.monotonic() < ends:
            time.sleep(0.01)
        if worker.running:
            self._complaints.append(f"{worker.name} did not end within {WARM:g} s of SIGTERM")
            # Celery's own: the stacks of all threads of the main process go to the log.
            os.kill(worker.pid, signal.SIGUSR1)
            time.sleep(1)
            with self._death(group=worker.pid):
                worker.kill()

    def _worker_stop(self, worker: Worker, fault: Fault) -> None:
        stop_for(worker, fault.seconds)

    def _worker_child(self, worker: Worker, fault: Fault) -> None:
        children = psutil.Process(worker.pid).children()
        if children:
            child = children[int(fault.choice * len(children))]
            with self._death(pid=child.pid), contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
                child.wait(QUIET)

    @contextlib.contextmanager
    def _death(self, pid: int = 0, group: int = 0) -> Iterator[None]:
        # Before, because nothing of it is certain any more; and after, for what it did meanwhile.
        self._recorder.note("died", pid=pid or group, group=group)
        yield
        self._recorder.note("died", pid=pid or group, group=group)

    def _link_cut(self, link: Link, fault: Fault) -> None:
        self._recorder.note("broken", detail=fault.target)
        link.cut()
        self._recorder.note("broken", detail=fault.target)

    def _link_delay(self, link: Link | Ties, fault: Fault) -> None:
        self._hold(link, fault)

    def _link_deafen(self, link: Link | Ties, fault: Fault) -> None:
        self._hold(link, fault, "there")

    def _link_silence(self, link: Link | Ties, fault: Fault) -> None:
        self._hold(link, fault, "back")

    def _hold(self, link: Link | Ties, fault: Fault, *ways: Way) -> None:
        link.hold(*ways)
        time.sleep(fault.seconds)
        link.pass_on()

    def _link_refuse(self, link: Link, fault: Fault) -> None:
        self._recorder.note("broken", detail=fault.target)
        link.refuse()
        time.sleep(fault.seconds)
        link.pass_on()
        self._recorder.note("broken", detail=fault.target)

    def _tie_cut(self, tie: Ties | Link, _fault: Fault) -> None:
        tie.cut()

    def _tie_refuse(self, tie: Ties | Link, fault: Fault) -> None:
        tie.refuse()
        time.sleep(fault.seconds)
        tie.pass_on()

    _tie_delay, _tie_deafen, _tie_silence = _link_delay, _link_deafen, _link_silence
    # What is between two members of etcd breaks no connection of a client either.
    _peer_cut, _peer_refuse = _tie_cut, _tie_refuse
    _peer_delay, _peer_deafen, _peer_silence = _tie_delay, _tie_deafen, _tie_silence

    def _cluster_move(self, cluster: ClusterOfServers, fault: Fault) -> None:
        cluster.move_some(random.Random(fault.choice))

    def _cluster_rebalance(self, cluster: ClusterOfServers, _fault: Fault) -> None:
        cluster.rebalance()

    def _cluster_join(self, cluster: ClusterOfServers, fault: Fault) -> None:
        """One more, which gets its share and hands it over again."""
        cluster.spare.start()
        self._over.wait(fault.seconds / 4)
        self._unsettle(fault)
        cluster.rebalance()
        self._over.wait(fault.seconds)
        self._unsettle(fault)
        cluster.spare.stop()
