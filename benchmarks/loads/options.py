"""What a journal, TLS, a secret and a cluster cost: our server with each of them, and without.

- CPU of the server per acquire and release at 64 connections that are kept;
- the wait of one connection for its grant (the median), which with TLS has the client's part in it;
- CPU of the server for a connection that is made, authenticates, says one `ping` and ends.

The journal (``--state-dir``) is where this machine has its temporary files; nothing is synced on
the way of a lock. TLS is what Python's `ssl` agrees on, with a P-256 certificate. The cluster is one
server over a real etcd: it has all shards, and looks at each request whether it may answer.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from benchmarks import cpu, servers
from benchmarks.bench import Bench, LeftOutError, turned
from benchmarks.exchange import Exchange, connect
from benchmarks.topic import Figures, Goal, Load, Topic
from tests.dflockd.cluster.stage import ClusterStage
from tests.dflockd.shards.etcd_process import Etcd

NONE = "none of them"
JOURNAL = "with a journal"
TLS = "with TLS"
AUTH = "with a secret"
CLUSTER = "in a cluster"
CONNECTIONS = 64
SECRET = "not a secret at all"

OPTIONS = {JOURNAL: "journal", TLS: "tls", AUTH: "secret", CLUSTER: "cluster"}

FACTORS = {JOURNAL: 1.2, TLS: 1.5, AUTH: 1.05, CLUSTER: 1.2}
"""Of the server's CPU: what they were before it was made lean, rounded up to a twentieth."""

SERVING_LEASE, MAX_LEASE = 10, 600
"""Of the cluster."""


class Way(NamedTuple):
    """A server, and how it is spoken to."""

    server: servers.Server
    tls: ssl.SSLContext | None = None
    secret: str | None = None

    def exchange(self, connections: int) -> Exchange:
        return Exchange([self.server.port], connections, "key", self.tls, self.secret)

    def per_turn(self, seconds: float) -> float:
        """Return microseconds of CPU."""
        with self.exchange(CONNECTIONS) as exchange:
            exchange.warm_up(seconds)
            before = cpu.spent(self.server.pid)
            run = exchange.run(seconds)
            return (cpu.spent(self.server.pid) - before) / run.turns * 1e6

    def latency(self, seconds: float) -> float:
        """Return microseconds."""
        with self.exchange(1) as exchange:
            return exchange.warm_up(seconds).run(seconds).wait(0.5) * 1e6

    def per_connection(self, seconds: float) -> float:
        """Return microseconds of CPU."""
        made, before = 0, cpu.spent(self.server.pid)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            with connect(self.server.port, self.tls, self.secret) as sock:
                sock.sendall(b"ping\n_\n_\n")
                sock.recv(64)
            made += 1
        return (cpu.spent(self.server.pid) - before) / made * 1e6


KINDS = (
    ("cpu", "Server CPU per acquire + release", Way.per_turn),
    ("wait", "Wait for a grant", Way.latency),
    ("connect", "Server CPU per connection made", Way.per_connection),
)


def certificate(bench: Bench) -> tuple[str, str]:
    """Return the files of a certificate for loopback and of its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise LeftOutError("there is no openssl to make a certificate with")
    cert, key = str(bench.directory / "cert.pem"), str(bench.directory / "key.pem")
    command = [
        *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-keyout", key, "-out", cert),
        *("-addext", "subjectAltName=IP:127.0.0.1"),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return cert, key


@contextmanager
def ways(bench: Bench) -> Iterator[dict[str, Way]]:
    with ExitStack() as stack:
        secret = bench.directory / "secret"
        secret.write_text(SECRET + "\n")
        state = str(bench.directory / "state")
        with cpu.pinned(-1):
            found = {
                NONE: Way(servers.ours(bench, stack, name="plain")),
                JOURNAL: Way(servers.ours(bench, stack, "--state-dir", state, name="journal")),
                AUTH: Way(
                    servers.ours(bench, stack, "--auth-token-file", str(secret), name="auth"),
                    secret=SECRET,
                ),
            }
            etcd = stack.enter_context(Etcd(bench.directory))
            cluster = ClusterStage(
                bench.directory,
                etcd,
                *("--max-locks", str(servers.MANY)),
                number=1,
                serving_lease=SERVING_LEASE,
                max_lease=MAX_LEASE,
            )
            cluster.servers[0].python = bench.python
            stack.enter_context(cluster).wait_settled()
            found[CLUSTER] = Way(cluster.servers[0])
            try:
                cert, key = certificate(bench)
            except LeftOutError as exc:
                bench.left_out[TLS] = str(exc)
            else:
                files = ("--tls-cert", cert, "--tls-key", key)
                server = servers.ours(bench, stack, *files, name="tls")
                found[TLS] = Way(server, tls=ssl.create_default_context(cafile=cert))
        with cpu.pinned(0):
            yield found


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    with ways(bench) as found:
        topics = {
            (kind, name): Topic(
                f"{kind}-{key}",
                f"{title}, {name}",
                "us",
                name,
                {NONE: Goal(FACTORS[name])} if kind == "cpu" else {},
            )
            for kind, title, _ in KINDS
            for name, key in OPTIONS.items()
            if name in found
        }

        def measure(number: int) -> Figures:
            figures: Figures = {}
            for kind, _, take in KINDS:
                each = {name: take(found[name], bench.seconds) for name in turned(found, number)}
                for name in each.keys() - {NONE}:
                    figures[topics[kind, name].key] = {name: each[name], NONE: each[NONE]}
            return figures

        yield Load(list(topics.values()), measure)
