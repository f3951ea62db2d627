"""A RabbitMQ of one's own: Debian's package, as any user, with everything in a directory.

    with RabbitMQ(directory) as rabbitmq:
        Connection(rabbitmq.url)

It listens on loopback only, and so does the `epmd` that every Erlang node needs: its own, since one
that was there already would go on, and one that Erlang starts would outlive the tests. A guard
process starts both and kills both when it is asked to, when one of them ends, and when the process
that wanted them is gone, however that ended.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from examples.demo.stage import Process, StageError

WAIT = 180.0
"""Seconds for the start. It takes five where nothing else runs."""

DEBIAN = "/usr/lib/rabbitmq/bin/rabbitmq-server"
"""What Debian's own `rabbitmq-server` runs once it has made sure that it is root or ``rabbitmq``."""

SETTINGS = """
[{rabbit, [
  {tcp_listeners, [{"127.0.0.1", PORT}]},
  {channel_tick_interval, 500}
]}].
"""
"""How often a broker looks for messages that were not acknowledged in time is a minute otherwise."""


class RabbitMQ(Process):
    """A RabbitMQ on a free port that it keeps when restarted, with its data; ready once started."""

    def __init__(self, directory: str | Path, name: str = "rabbitmq") -> None:
        super().__init__(directory, name)
        self.home = self.directory.resolve() / f"{name}.d"
        self.port, self._epmd_port, self._node_port = _free_ports(3)
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        self._env |= {
            "HOME": str(self.home),  # of the cookie
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "RABBITMQ_NODENAME": f"{name}{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._node_port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "-noinput -kernel inet_dist_use_interface {127,0,0,1}"
            ),
            "RABBITMQ_ALLOW_INPUT": "1",  # no shell between the guard and the server
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.home / "advanced.config"),
            "RABBITMQ_CONFIG_FILE": str(self.home / "none.conf"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.home / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.home / "data"),
            "RABBITMQ_LOG_BASE": str(self.home),
            "RABBITMQ_LOGS": "-",
        }

    def evaluate(self, expression: str) -> str:
        """What the server answers to an expression in Erlang.

        `rabbitmqctl` reads its own code in thousands of steps, and waits for a free core before each:
        a minute on a machine at load 15.
        """
        cookie = (self.home / ".erlang.cookie").read_text()
        node = f"127.0.0.1:{self._node_port}"
        done = subprocess.run(
            [_erl_call(), "-address", node, "-c", cookie, "-e"],
            env=self._env,
            input=f"{expression}.\n",
            capture_output=True,
            text=True,
            timeout=WAIT,
            check=False,
        )
        answer = re.fullmatch(r"\{ok, (.*)\}", done.stdout, re.DOTALL)
        if done.returncode or answer is None:
            raise StageError(f"RabbitMQ: {expression}: {done.stdout}{done.stderr}")
        return answer[1]

    def _command(self) -> Sequence[str]:
        self.home.mkdir(exist_ok=True)
        (self.home / "advanced.config").write_text(SETTINGS.replace("PORT", str(self.port)))
        (self.home / "plugins").write_text("[].")
        guard = (sys.executable, "-m", "tests.rabbitmq", str(os.getpid()))
        epmd = (_epmd(), "-port", str(self._epmd_port), "-address", "127.0.0.1")
        return [*guard, *epmd, "--", str(_executable())]

    def _after_start(self) -> None:
        self.wait_log("Server startup complete", WAIT)


def missing() -> str | None:
    """Why there can be no RabbitMQ on this machine; ``None`` if there can be one."""
    try:
        _executable(), _epmd(), _erl_call()
    except StageError as error:
        return str(error)
    return None if hasattr(os, "pidfd_open") else "RabbitMQ is tested on Linux only"


def _executable() -> Path:
    found = DEBIAN if os.access(DEBIAN, os.X_OK) else shutil.which("rabbitmq-server")
    if not found:
        raise StageError(
            "No RabbitMQ found: apt-get install --no-install-recommends rabbitmq-server"
        )
    return Path(found)


def _epmd() -> str:
    found = shutil.which("epmd")
    if not found:
        raise StageError("No epmd found: install Erlang (apt-get install erlang-base)")
    return found


def _erl_call() -> Path:
    erl = shutil.which("erl")
    found = Path(erl).resolve().with_name("erl_call") if erl else None
    if found is None or not found.exists():
        raise StageError("No erl_call found: install Erlang (apt-get install erlang-base)")
    return found


def _free_ports(number: int) -> list[int]:
    """Ports that differ: all are open at once."""
    with ExitStack() as sockets:
        several = [sockets.enter_context(socket.socket()) for _ in range(number)]
        for each in several:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in several]


def guard(wanted_by: int, *command: str) -> None:
    """Run the programs, words parted by ``--``, until one of them or who wanted them has ended.

    It leads a process group (see `Process`), which is killed as a whole.
    """
    between = command.index("--")
    programs = (command[:between], command[between + 1 :])
    try:
        watched = [os.pidfd_open(wanted_by)]
        watched += [os.pidfd_open(subprocess.Popen(each).pid) for each in programs]
        select.select(watched, [], [])
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    guard(int(sys.argv[1]), *sys.argv[2:])
