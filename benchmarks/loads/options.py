"""What a journal, TLS, a secret and a cluster cost: our server with each of them, and without.

It is CPU of the server per acquire and release, at 64 connections that are kept.

The journal (``--state-dir``) is where this machine has its temporary files; nothing is synced on
the way of a lock. TLS is what Python's `ssl` agrees on, with a P-256 certificate. The cluster is one
server over a real etcd: it has all shards, and looks at each request whether it may answer.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from benchmarks import cpu, servers
from benchmarks.bench import Bench, LeftOutError, turned
from benchmarks.loads.server_cpu import per_turn
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

GOALS = {JOURNAL: Goal(1.2, 1.1), TLS: Goal(1.5, 1.3), AUTH: Goal(1.05), CLUSTER: Goal(1.2)}
"""What the server's CPU may be of what it is without."""

Way: TypeAlias = tuple[servers.Server, dict[str, Any]]
"""A server, and how an `Exchange` speaks to it."""

SERVING_LEASE, MAX_LEASE = 10, 600
"""Of the cluster."""


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
            found: dict[str, Way] = {
                NONE: (servers.ours(bench, stack, name="plain"), {}),
                JOURNAL: (servers.ours(bench, stack, "--state-dir", state, name="journal"), {}),
                AUTH: (
                    servers.ours(bench, stack, "--auth-token-file", str(secret), name="auth"),
                    {"secret": SECRET},
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
            found[CLUSTER] = (cluster.servers[0], {})
            try:
                cert, key = certificate(bench)
            except LeftOutError as exc:
                bench.left_out[TLS] = str(exc)
            else:
                files = ("--tls-cert", cert, "--tls-key", key)
                server = servers.ours(bench, stack, *files, name="tls")
                found[TLS] = (server, {"tls": ssl.create_default_context(cafile=cert)})
        with cpu.pinned(0):
            yield found


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    with ways(bench) as found:
        topics = {
            name: Topic(
                f"cpu-{name.split()[-1]}",
                f"Server CPU per acquire + release, {name}",
                "us",
                name,
                {NONE: GOALS[name]},
            )
            for name in GOALS
            if name in found
        }

        def measure(number: int) -> Figures:
            each = {}
            for name in turned(found, number):
                server, how = found[name]
                each[name] = per_turn(server, CONNECTIONS, bench.seconds, **how)
            return {
                topic.key: {name: each[name], NONE: each[NONE]} for name, topic in topics.items()
            }

        yield Load(list(topics.values()), measure)
