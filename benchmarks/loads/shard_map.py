"""What it costs to say where 8192 shards are: two servers of a cluster over a real etcd.

Clients ask for the map when they look for a lost server, all of them at the same time. Most have it
already, and ask whether it is still the same. The gaps are those of a client beside them, which renews
its lock without a pause: while 5,000 a second ask for what they have; while 900 connections have the
whole map sent again and again, as clients of 0.1 do after a crash; and while shards move, so that it
is another map each time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Self

from benchmarks import cpu
from benchmarks.bench import Bench
from benchmarks.child import Child
from benchmarks.gaps import Prober
from benchmarks.servers import OURS
from benchmarks.topic import Figures, Goal, Load, Topic
from dflockd.shards import get_shard_id
from examples.demo.stage import LockServer
from tests.dflockd.cluster.stage import ClusterServer, ClusterStage
from tests.dflockd.shards.etcd_process import Etcd

FEW, MANY = 100, 900
"""Connections that ask as often as they are answered, and those of a crowd after a crash."""
KNOWING, CROWD = 5_000, 1_260
"""How often a second those ask who have the map, and how often the crowd does."""
MOVED = 1_500
"""Shards that go to the other server and come back."""
SERVING_LEASE, MAX_LEASE = 10, 600
"""Of the cluster; the prober asks for such a lease."""
PROBED = get_shard_id("probe")
"""The shard of its key."""
LIMIT = Goal(20.0, 5.0)

PING, WHOLE, PACKED = "ping\n_\n_\n", "shards\n_\n_\n", "shards\n_\n_ zlib\n"
KNOWN = "still the same"
IDLE, ALONE = "dflockd, nothing to do", "dflockd, the moves alone"


class Asker(Child):
    """Connections that ask one thing; see `benchmarks.programs.asker`."""

    @classmethod
    def at(cls, server: LockServer, connections: int) -> Self:
        return cls.of("benchmarks.programs.asker", str(server.port), str(connections))

    def run(self, request: str, seconds: float, rate: float = 0) -> float:
        """Return how many answers came a second; with a rate it does not ask more often."""
        answers, _, took = json.loads(self.ask(json.dumps([request, seconds, rate])))
        return float(answers / took)


class Scene(NamedTuple):
    """A server that has the prober's lock, another one, and who asks the first."""

    stage: ClusterStage
    server: ClusterServer
    other: ClusterServer
    prober: Prober
    few: Asker
    many: Asker

    @classmethod
    def of(cls, stage: ClusterStage, stack: ExitStack) -> Self:
        stage.wait_settled()
        server = stage.at(stage.mapping.records()[PROBED].current)
        [other] = [each for each in stage.servers if each is not server]
        with cpu.pinned(0):
            prober = stack.enter_context(Prober.at(server))
            few, many = (stack.enter_context(Asker.at(server, n)) for n in (FEW, MANY))
        return cls(stage, server, other, prober, few, many)

    @property
    def known(self) -> str:
        """The request of those who have the map."""
        version = self.server.report()["version"]
        return f"shards\n_\n{version} zlib\n"

    def rates(self, seconds: float) -> dict[str, float]:
        requests = {KNOWN: self.known, "packed": PACKED, "whole": WHOLE, "a ping": PING}
        return {name: self.few.run(request, seconds) for name, request in requests.items()}

    def gap(self, who: Asker, request: str, seconds: float, rate: float) -> dict[str, float]:
        idle = self.prober.idle(seconds)
        with self.prober.watching() as found:
            who.run(request, seconds, rate)
        return {OURS: found[0], IDLE: idle}

    def gap_of_moves(self, number: int, rate: float) -> dict[str, float]:
        records = self.stage.mapping.records()
        mine = [shard for shard, record in records.items() if record.current == self.server.address]
        mine = [shard for shard in mine if shard != PROBED][:number]

        def move() -> None:
            self.stage.move(mine, self.other)
            self.stage.move(mine, self.server)

        with self.prober.watching() as alone:
            move()
        with self.prober.watching() as found:
            moving = threading.Thread(target=move)
            moving.start()
            while moving.is_alive():
                self.many.run(PACKED, 0.2, rate)
            moving.join()
        return {OURS: found[0], ALONE: alone[0]}


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    knowing, crowd = bench.scaled(KNOWING), bench.scaled(CROWD)
    moved, seconds = bench.scaled(MOVED), 2 * bench.seconds
    topics = [
        Topic(
            "map-requests",
            f"Answers to `shards` per second, {FEW} connections",
            "/s",
            KNOWN,
            more_is_better=True,
        ),
        *(
            Topic(key, f"Longest gap while {what}", "ms", OURS, limit=LIMIT)
            for key, what in {
                "gap-map-known": f"{knowing:,} a second ask for the map that they have",
                "gap-map-whole": f"{MANY} connections ask {crowd:,} times a second for all of it",
                "gap-map-packed": f"{MANY} connections ask {crowd:,} times a second for it packed",
                "gap-map-moves": f"they do so while {moved:,} shards go and come",
            }.items()
        ),
    ]
    with ExitStack() as stack:
        with cpu.pinned(-1):
            etcd = stack.enter_context(Etcd(bench.directory))
            cluster = ClusterStage(
                bench.directory, etcd, number=2, serving_lease=SERVING_LEASE, max_lease=MAX_LEASE
            )
            for server in cluster.servers:
                server.python = bench.python
            stack.enter_context(cluster)
        scene = Scene.of(cluster, stack)

        def measure(_: int) -> Figures:
            found = [
                scene.rates(bench.seconds),
                scene.gap(scene.few, scene.known, seconds, knowing),
                scene.gap(scene.many, WHOLE, seconds, crowd),
                scene.gap(scene.many, PACKED, seconds, crowd),
                scene.gap_of_moves(moved, crowd),
            ]
            return {topic.key: each for topic, each in zip(topics, found, strict=True)}

        yield Load(topics, measure, rounds=3)
