"""Lock servers with a wrong clock take part in a cluster: gRPC's deadlines are not theirs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.dflockd.cluster.stage import ClusterServer, ClusterStage
from tests.dflockd.shards.etcd_process import Etcd


class SteppedServer(ClusterServer):
    step = "0"

    def _command(self) -> Sequence[str]:
        python, option, _, *args = super()._command()
        return [python, option, "tests.chaos.stepped", self.step, *args]


@pytest.mark.parametrize("step", ["-1800", "1800"])
def test_a_server_with_a_wrong_clock_joins(tmp_path: Path, step: str) -> None:
    with Etcd(tmp_path) as etcd:
        stage = ClusterStage(tmp_path, etcd, number=0, serving_lease=10, max_lease=60)
        server = SteppedServer(tmp_path, *stage.arguments(), name="stepped")
        server.step = step
        try:
            server.start()
            server.wait_joined()
        finally:
            server.kill()
