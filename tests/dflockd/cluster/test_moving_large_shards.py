"""Real servers over a real etcd: a shard that is more than etcd takes at once goes over whole."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from pathlib import Path

from tests.dflockd.cluster.stage import ClusterServer, settled
from tests.dflockd.raw_server import RawClient, granted

NUMBER = 15_000
SHARD = 7
AT_ONCE = 500


def ask_all(client: RawClient, command: str, asked: Sequence[tuple[str, str]]) -> list[str]:
    """Ask the same of many keys, some hundreds at a time."""
    answers = []
    for first in range(0, len(asked), AT_ONCE):
        some = asked[first : first + AT_ONCE]
        client.send("".join(f"{command}\n{key}\n{how}\n" for key, how in some).encode())
        answers += [client.line() for _ in some]
    return answers


def test_a_shard_of_some_megabytes_is_moved_and_drained(tmp_path: Path) -> None:
    flags = ("--max-locks", "1000000", "--max-holds", "0")
    with settled(tmp_path, *flags, number=2, serving_lease=3, lease=120) as cluster:
        first, second = cluster.servers
        cluster.move([SHARD], first)
        client = cluster.connect(first)
        chance = random.Random(1)
        labels = ("".join(chance.choices(string.ascii_letters, k=200)) for _ in range(NUMBER))
        keys = [f"shard#{SHARD}/{number}" for number in range(NUMBER)]
        how = [f"timeout=0 lease=120 label={label}" for label in labels]
        locks = ask_all(client, "acquire", list(zip(keys, how, strict=True)))
        tokens = dict(zip(keys, map(granted, locks), strict=True))

        def is_all_at(server: ClusterServer) -> None:
            """Each of them is held there, and others are granted without a wait."""
            client = cluster.connect(server)
            _, free = cluster.follow("l", f"shard#{SHARD}/{server.name}", "0 30")
            assert free.startswith("ok")
            renewals = ask_all(client, "n", [(key, f"{tokens[key]} 120") for key in keys])
            assert set(renewals) == {"ok 120"}

        cluster.move([SHARD], second)
        is_all_at(second)
        second.stop()
        assert "handed over" not in second.log_text(), "all of it was"
        is_all_at(first)
