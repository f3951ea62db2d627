"""Figures of a cluster under load: `python -m tests.chaos.figures [rolling crash move held]`.

    rolling  every server in turn: SIGTERM, a new start, and its share of the shards again
    crash    SIGKILL for a server, against the formula for when its keys are granted again
    move     a third of the shards gets another server
    held     the same with 10,000 locks held in them

A process takes and gives back keys, each its own all the time, and holds some more that it renews
all the time. The pause of a key is the longest time from an attempt to its success.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dflockd.client import DistributedLock
from dflockd.cluster.leader import SETTLE
from dflockd.shards import get_shard_id
from examples.demo.stage import Process
from tests.dflockd.cluster.stage import ClusterServer, ClusterStage
from tests.dflockd.raw_server import RawClient
from tests.dflockd.shards.etcd_process import Etcd

KEYS, HELD = 60, 40
"""Keys that are taken all the time, and that are held all the time."""

PAUSE = 0.05
"""Seconds between two attempts for one key."""

MANY = 10_000
CALM = 3.0
"""Seconds of load before anything happens, and after."""

NAMES = ("rolling", "crash", "move", "held")


# The load.


class Load(Process):
    """The process that uses the cluster, until SIGTERM."""

    results = "load.json"

    def __init__(self, directory: Path, cluster: str, lease: int) -> None:
        super().__init__(directory, "load")
        self._arguments = ["--load", cluster, "--lease", str(lease), "--directory", str(directory)]

    def _command(self) -> Sequence[str]:
        return [sys.executable, "-m", "tests.chaos.figures", *self._arguments]

    def _after_start(self) -> None:
        self.wait_log("ready")

    def finish(self) -> Record:
        self.stop(60)
        return Record(**json.loads((self.directory / self.results).read_text()))


class Record:
    """What the load has seen: for each key the beginnings and ends of what succeeded."""

    def __init__(
        self,
        taken: dict[str, list[tuple[float, float]]],
        renewed: dict[str, list[tuple[float, float]]],
        lost: list[str],
    ) -> None:
        self.taken, self.renewed, self.lost = taken, renewed, lost

    def pauses(self, spans: dict[str, list[tuple[float, float]]], after: float) -> list[float]:
        """The longest attempt of each key among those that ended after a time."""
        return sorted(
            max((b - a for a, b in times if b > after), default=0) for times in spans.values()
        )


async def _take(key: str, cluster: str, lease: int, times: list[tuple[float, float]]) -> None:
    while True:
        lock = DistributedLock(key, 300, lease, cluster)
        began = time.monotonic()
        if await lock.acquire():
            times.append((began, time.monotonic()))
            await lock.release()
        await asyncio.sleep(PAUSE)


async def _hold(
    key: str, cluster: str, lease: int, times: list[tuple[float, float]], lost: list[str]
) -> None:
    lock = DistributedLock(key, 300, lease, cluster, on_lost=lambda _: lost.append(key))
    await lock.acquire()
    while lock.held:
        began = time.monotonic()
        if await lock.renew():
            times.append((began, time.monotonic()))
        await asyncio.sleep(PAUSE * 4)


async def _load(cluster: str, lease: int) -> dict[str, object]:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    taken: dict[str, list[tuple[float, float]]] = {f"taken-{n}": [] for n in range(KEYS)}
    renewed: dict[str, list[tuple[float, float]]] = {f"held-{n}": [] for n in range(HELD)}
    lost: list[str] = []
    tasks = [asyncio.create_task(_take(k, cluster, lease, t)) for k, t in taken.items()]
    tasks += [asyncio.create_task(_hold(k, cluster, lease, t, lost)) for k, t in renewed.items()]
    print("ready", flush=True)
    await stopped.wait()
    failed = [str(task.exception()) for task in tasks if task.done() and task.exception()]
    for task in tasks:
        task.cancel()
    return {"taken": taken, "renewed": renewed, "lost": lost + failed}


# What is done to it.


@contextlib.contextmanager
def _cluster(serving_lease: int, lease: int) -> Iterator[tuple[ClusterStage, Load]]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        flags = ("--default-lease-ttl", str(lease), "--max-locks", str(10 * MANY))
        with (
            Etcd(directory) as etcd,
            ClusterStage(
                directory, etcd, *flags, serving_lease=serving_lease, max_lease=lease
            ) as cluster,
        ):
            cluster.wait_settled()
            with Load(directory, cluster.address, lease) as load:
                time.sleep(CALM)
                yield cluster, load


def _percentiles(pauses: Sequence[float]) -> str:
    at = pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))]
    return (
        f"median {statistics.median(pauses) * 1000:.0f} ms, p99 {at * 1000:.0f} ms, "
        f"worst {pauses[-1] * 1000:.0f} ms"
    )


def rolling(serving_lease: int, lease: int) -> None:
    with _cluster(serving_lease, lease) as (cluster, load):
        began = time.monotonic()
        for server in cluster.servers:
            server.stop()
            server.start()
            server.wait_joined()
            cluster.mapping.rebalance()
            cluster.wait_settled()
        took = time.monotonic() - began
        time.sleep(CALM)
        record = load.finish()
    print(f"rolling restart of {len(cluster.servers)} servers: {took:.1f} s")
    print(f"  locks lost              {len(record.lost)} {record.lost or ''}")
    print(f"  pause of a key taken    {_percentiles(record.pauses(record.taken, began))}")
    print(f"  pause of a lock held    {_percentiles(record.pauses(record.renewed, began))}")


def crash(serving_lease: int, lease: int) -> None:
    with _cluster(serving_lease, lease) as (cluster, load):
        killed = cluster.servers[0]
        records = cluster.mapping.records()

        def was_there(key: str) -> bool:
            return records[get_shard_id(key)].current == killed.address

        killed.kill()
        began = time.monotonic()
        cluster.wait_gone(killed)
        gone = time.monotonic() - began
        cluster.wait_settled()
        settled = time.monotonic() - began
        time.sleep(cluster.parameters.grace + CALM)
        record = load.finish()
    taken = {key: times for key, times in record.taken.items() if was_there(key)}
    renewed = {key: times for key, times in record.renewed.items() if was_there(key)}
    again = sorted(_granted_again(times, began) - began for times in taken.values())
    grace = cluster.parameters.grace
    print(f"crash of a server, serving lease {serving_lease} s, longest lease {lease} s")
    print(f"  taken for dead after    {gone:.1f} s; all shards with others after {settled:.1f} s")
    print(f"  first new grant after   {again[0]:.1f} s, the last key's {again[-1]:.1f} s")
    formula = f"serving lease {serving_lease} + settling {SETTLE:g} + claim + grace {grace:.1f}"
    print(f"  formula                 {formula} = {serving_lease + SETTLE + grace:.1f} s + claim")
    print(f"  held there without renewal: {_percentiles(record.pauses(renewed, began))}")
    print(f"  locks lost              {len(record.lost)} {record.lost or ''}")


def _granted_again(times: list[tuple[float, float]], after: float) -> float:
    """When the attempt succeeded that had to wait for the longest."""
    return max((span for span in times if span[1] > after), key=lambda span: span[1] - span[0])[1]


def move(serving_lease: int, lease: int, held: int = 0) -> None:
    with _cluster(serving_lease, lease) as (cluster, load):
        source, target, _ = cluster.servers
        records = cluster.mapping.records()
        shards = [shard for shard, r in records.items() if r.current == source.address]
        holder = source.connect()
        tokens = _hold_many(holder, shards, held, lease)
        began = time.monotonic()
        cluster.move(shards, target)
        took = time.monotonic() - began
        lost = _renew_many(target, tokens, lease)
        holder.close()
        time.sleep(CALM)
        record = load.finish()
    print(f"{len(shards)} of 8192 shards moved, with {held} more locks held in them: {took:.2f} s")
    print(f"  locks lost              {len(record.lost) + len(lost)}")
    print(f"  pause of a key taken    {_percentiles(record.pauses(record.taken, began))}")
    print(f"  pause of a lock held    {_percentiles(record.pauses(record.renewed, began))}")


def _hold_many(client: RawClient, shards: Sequence[int], number: int, lease: int) -> dict[str, str]:
    """Hold so many locks in these shards on one connection; the tokens by key."""
    keys: list[str] = []
    wanted, candidate = set(shards), 0
    while len(keys) < number:
        candidate += 1
        if get_shard_id(f"many-{candidate}") in wanted:
            keys.append(f"many-{candidate}")
    found = {}
    for start in range(0, number, 500):
        batch = keys[start : start + 500]
        client.send("".join(f"l\n{key}\n0 {lease}\n" for key in batch).encode())
        for key in batch:
            status, token, _ = client.line().split()
            assert status == "ok"
            found[key] = token
    return found


def _renew_many(server: ClusterServer, tokens: dict[str, str], lease: int) -> list[str]:
    """Renew them at their new server; return those that are lost."""
    if not tokens:
        return []
    client = server.connect()
    lost = []
    pairs = list(tokens.items())
    for start in range(0, len(pairs), 500):
        batch = pairs[start : start + 500]
        client.send("".join(f"n\n{key}\n{token} {lease}\n" for key, token in batch).encode())
        lost += [key for key, _ in batch if not client.line().startswith("ok")]
    client.close()
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.figures")
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--serving-lease", type=int, default=10)
    parser.add_argument("--lease", type=int, default=60)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        found = asyncio.run(_load(given.load, given.lease))
        (given.directory / Load.results).write_text(json.dumps(found))
        return
    for name in given.names or NAMES:
        if name == "held":
            move(given.serving_lease, given.lease, MANY)
        else:
            {"rolling": rolling, "crash": crash, "move": move}[name](
                given.serving_lease, given.lease
            )


if __name__ == "__main__":
    main()
