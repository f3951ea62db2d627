"""The metrics, as Prometheus reads them. What each means is in docs/metrics.md.

Nothing is counted here: the table and the server count, in integers, and this reads them when it is
asked. No label takes its values from users: a thousand keys are one number.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dflockd import __version__, clock, compiled
from dflockd.cluster.tenures import Stage
from dflockd.http.health import ClusterHealth, Probe, look
from dflockd.server import Server, Slices
from dflockd.storage import SEGMENT, Journal
from dflockd.table import Histogram

LAG_INTERVAL = 0.25
"""Seconds from one look at the clock to the next, by which the lag of the event loop is measured."""

PROCESS_INTERVAL = 1.0
"""Seconds from one look at the process to the next: its thread and the event loop get in each
other's way."""

STATUSES = ("serving", "recovering", "cut off", "closed")
"""See `LockTable.status`."""

LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
"""Bounds for that lag, in seconds."""


class LoopLag:
    """How late the event loop is: how long a request waits before it is seen."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.seen = Histogram(LAGS)
        self._loop = loop
        self._wake()

    def _wake(self) -> None:
        self._due = clock.now() + LAG_INTERVAL
        self._timer = self._loop.call_later(LAG_INTERVAL, self._look)

    def _look(self) -> None:
        self.seen.add(max(0.0, clock.now() - self._due))
        self._wake()

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()


class ServerCollector:
    """The metrics of one server; several can live in one process, each with its own registry."""

    def __init__(
        self,
        server: Server,
        probes: Sequence[Probe],
        lag: LoopLag,
        journal: Journal | None,
        cluster: ClusterHealth | None,
        good_until: Callable[[], Mapping[str, float]],
    ) -> None:
        self._server = server
        self._probes = probes
        self._lag = lag
        self._journal = journal
        self._cluster = cluster
        self._good_until = good_until

    def collect(self) -> Iterator[Metric]:
        """Read the metrics, each when it is asked for."""
        yield from self._state()
        yield from self._grants()
        yield from self._rates()
        yield from self._ends()
        yield from self._renewals()
        yield from self._network()
        if self._journal is not None:
            yield from self._disk(self._journal)
        if self._cluster is not None:
            yield from self._shards(self._cluster)
        loop = type(self._server.loop).__module__.partition(".")[0]
        yield InfoMetricFamily(
            "dflockd_build",
            "Version of the server and its runtime.",
            {
                "version": __version__,
                "compiled": str(compiled).lower(),
                "python": platform.python_version(),
                "loop": loop,
            },
        )

    def _state(self) -> Iterator[Metric]:
        table = self._server.table
        yield _gauge("dflockd_keys", "Keys that are held or waited for.", len(table))
        yield _gauge(
            "dflockd_keys_limit", "Limit of these keys (--max-locks).", table.limits.max_locks
        )
        yield _gauge("dflockd_holds", "Slots that are taken.", table.counts.holding)
        yield _gauge("dflockd_waiters", "Positions in a queue.", table.counts.waiting)
        deadlocks = self._server.deadlocks
        yield _gauge(
            "dflockd_blocking_chain",
            "Longest chain of waits: 2 where a holder waits for another lock.",
            deadlocks.longest,
        )
        yield _gauge(
            "dflockd_waiting_groups",
            "Groups that somebody waits in, of keys where groups take turns, as of the last look.",
            deadlocks.groups,
        )
        yield _gauge(
            "dflockd_blocking_circles",
            "Deadlocks: circles of holders that wait for one another.",
            deadlocks.number,
        )
        yield _gauge(
            "dflockd_oldest_wait_seconds",
            "Longest current wait, as of the last look.",
            deadlocks.oldest(clock.now()),
        )
        ready, checks = look(self._probes)
        yield _gauge("dflockd_ready", "1 while /readyz says so.", int(ready))
        status = GaugeMetricFamily(
            "dflockd_status", "1 for the status that the server has.", labels=["status"]
        )
        now = self._server.table.status(clock.now())
        for word in STATUSES:
            status.add_metric([word], int(word == now))
        yield status
        family = GaugeMetricFamily(
            "dflockd_check", "1 while this condition of /readyz holds.", labels=["check"]
        )
        for check in checks:
            family.add_metric([check.name], int(check.ok))
        yield family

    def _grants(self) -> Iterator[Metric]:
        counts = self._server.table.counts
        yield _counter("dflockd_grants", "Slots that were granted.", counts.granted)
        # A grant without a wait is in no bucket of the table: that is what it does most.
        waited = Histogram(counts.waited.bounds)
        waited.counts = counts.waited.counts.copy()
        waited.counts[0] += counts.granted - len(counts.waited)
        waited.sum = counts.waited.sum
        yield _histogram("dflockd_wait_seconds", "Time from the request to the grant.", waited)
        yield _counters(
            "dflockd_refusals",
            "Requests for a slot that were refused at once.",
            "reason",
            {"busy": counts.busy, "limit": counts.full, "older": counts.outdated},
        )
        yield _counters(
            "dflockd_waits_abandoned",
            "Waits that ended without a grant.",
            "reason",
            {
                "timeout": counts.timed_out,
                "forgotten": counts.forgotten,
                "superseded": counts.ousted,
                "disconnect": counts.left,
            },
        )
        yield _counter(
            "dflockd_holders_superseded",
            "Holders that were told that a newer task wants their lock.",
            counts.asked_to_stop,
        )
        yield _gauge(
            "dflockd_paused_keys",
            "Keys that operators have paused.",
            self._server.table.slots.paused,
        )
        yield _gauge(
            "dflockd_newest",
            "Keys whose newest task is remembered.",
            len(self._server.table.newest),
        )
        yield _counter(
            "dflockd_waits_kept",
            "Waits that ended and left a reservation in the queue.",
            counts.kept,
        )

    def _rates(self) -> Iterator[Metric]:
        table = self._server.table
        yield _gauge("dflockd_rates", "Keys with a rate.", table.rates.size)
        yield _gauge(
            "dflockd_rate_runs",
            "Runs that all rates together allow in their windows.",
            table.rates.promised,
        )
        yield _gauge(
            "dflockd_rate_runs_limit",
            "Limit of these runs (--max-rate-runs).",
            table.limits.max_rate_runs,
        )
        yield _counters(
            "dflockd_rate_places",
            "Granted places of rates, by whether a run has begun in them.",
            "reason",
            {"begun": table.counts.begun, "given_back": table.counts.unbegun},
        )

    def _ends(self) -> Iterator[Metric]:
        counts = self._server.table.counts
        yield _counters(
            "dflockd_holds_ended",
            "Holds that have ended.",
            "reason",
            {
                "release": counts.released,
                "disconnect": counts.parted,
                "expiry": counts.expired,
                "lapse": counts.lapsed,
                "eviction": counts.evicted,
                "superseded": counts.superseded,
            },
        )
        yield _histogram("dflockd_hold_seconds", "Time from the grant to the end.", counts.held)
        yield _counter(
            "dflockd_holds_returned", "Holds taken over from another table.", counts.returned
        )

    def _renewals(self) -> Iterator[Metric]:
        counts = self._server.table.counts
        yield _counters(
            "dflockd_renewals",
            "Requests to renew a lease.",
            "result",
            {"ok": len(counts.renewed), "unknown": counts.unknown},
        )
        yield _histogram(
            "dflockd_renewal_lease_used_ratio",
            "Share of the lease that had passed when a hold was renewed.",
            counts.renewed,
        )

    def _network(self) -> Iterator[Metric]:
        server = self._server
        yield _gauge("dflockd_connections", "Clients that are connected.", len(server.sessions))
        yield _counter(
            "dflockd_connections_refused", "Clients that were refused.", server.turned_away
        )
        yield _counter(
            "dflockd_auth_failures", "Clients without the right auth token.", server.unauthorized
        )
        if good_until := self._good_until():
            yield self._expiry(good_until)
        yield _histogram(
            "dflockd_event_loop_lag_seconds",
            "How late the event loop runs what is due.",
            self._lag.seen,
        )

    def _expiry(self, good_until: Mapping[str, float]) -> Metric:
        expiry = GaugeMetricFamily(
            "dflockd_certificate_expiry_timestamp_seconds",
            "Time at which a certificate of this setting expires first, in Unix time.",
            labels=["setting"],
        )
        for setting, until in good_until.items():
            expiry.add_metric([setting], until)
        return expiry

    def _disk(self, journal: Journal) -> Iterator[Metric]:
        size = journal.segments * SEGMENT
        yield _gauge("dflockd_journal_bytes", "Bytes of the journal on disk.", size)
        yield _gauge(
            "dflockd_journal_live_bytes",
            "Bytes of the journal that are still needed.",
            journal.live_size,
        )
        yield _gauge(
            "dflockd_state_free_bytes",
            "Free bytes on the disk of the journal; 0 if unknown.",
            journal.free,
        )
        yield _gauge("dflockd_journal_segments", "Files of the journal.", journal.segments)

    def _shards(self, cluster: ClusterHealth) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "dflockd_shards", "Shards of this server, by stage.", labels=["stage"]
        )
        counts = cluster.counts()
        for stage in Stage:
            family.add_metric([stage.value], counts.get(stage.value, 0))
        yield family
        conditions = GaugeMetricFamily(
            "dflockd_cluster_shards",
            "Shards of the whole cluster, by their conditions, as this server knows.",
            labels=["condition"],
        )
        for condition, number in cluster.conditions().items():
            conditions.add_metric([condition], number)
        yield conditions
        yield _gauge(
            "dflockd_shards_unserved",
            "Shards assigned to this server that no server serves.",
            len(cluster.unserved()),
        )
        total, in_use = cluster.store_size or (0, 0)
        yield _gauge(
            "dflockd_store_bytes", "Size of the database of etcd; 0 before the first look.", total
        )
        yield _gauge(
            "dflockd_store_used_bytes", "Bytes of the database of etcd that are in use.", in_use
        )
        now = clock.now()
        recovering = sum(
            1
            for group in self._server.table.each_partition()
            if group.recovers_until is not None and group.recovers_until > now
        )
        yield _gauge(
            "dflockd_shards_recovering",
            "Shards that wait for earlier holders to renew.",
            recovering,
        )


class Exposition:
    """What Prometheus is answered: the metrics of a server, then those of its process.

    Requests that come while an answer is being made get the same one.
    """

    def __init__(self, collector: ServerCollector, slices: Slices) -> None:
        self._slices = slices
        self._collector = collector
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        GCCollector(registry=self._process)
        self._making: asyncio.Task[bytes] | None = None
        self._of_process = b""
        self._of_process_until = 0.0

    async def text(self) -> bytes:
        """Return them in Prometheus' text format."""
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make())
        # A client that goes away meanwhile does not end it for the others.
        return await asyncio.shield(self._making)

    async def _make(self) -> bytes:
        if clock.now() >= self._of_process_until:
            # Open files are counted one by one, which takes milliseconds with thousands of clients.
            self._of_process = await asyncio.to_thread(generate_latest, self._process)
            self._of_process_until = clock.now() + PROCESS_INTERVAL
        return await self._slices.seen(self._of_server()) + self._of_process

    def _of_server(self) -> Generator[None, None, bytes]:
        texts = []
        for metric in self._collector.collect():
            registry = CollectorRegistry()
            registry.register(_One(metric))
            texts.append(generate_latest(registry))
            yield
        return b"".join(texts)


class _One(Collector):
    """A metric that has been read."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value)


def _counters(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for word, value in values.items():
        family.add_metric([word], value)
    return family


def _histogram(name: str, text: str, values: Histogram) -> Metric:
    buckets, below = [], 0
    bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
    for bound, number in zip(bounds, values.counts, strict=True):
        below += number
        buckets.append((bound, below))
    return HistogramMetricFamily(name, text, buckets, values.sum)
