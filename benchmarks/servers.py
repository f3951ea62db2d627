"""The servers that are compared.

A `prefix` is what comes before the command of a server, as `benchmarks.callgrind` needs it.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias, TypeVar

from benchmarks import interpreters, published
from benchmarks.bench import Bench, LeftOutError
from examples.demo import stage

OURS = "dflockd"
PLAIN = "dflockd, plain Python"
BEFORE = f"dflockd as it was ({interpreters.BEFORE})"
BARE = "a server that does not look"
GO = "dflockd (Go)"

MANY = 1_000_000
"""Locks that a server may have: the benchmarks are not about its limits."""


class BareServer(stage.LockServer):
    """`benchmarks.programs.bare_server`."""

    def _command(self) -> Sequence[str]:
        return [sys.executable, "-m", "benchmarks.programs.bare_server"]


class Other(stage.Process):
    """A published dflockd server, of which only the variables are known that all versions read."""

    host = "127.0.0.1"

    def __init__(self, directory: Path, name: str, *command: str) -> None:
        self.port = free_port()
        variables = {
            "DFLOCKD_HOST": self.host,
            "DFLOCKD_PORT": str(self.port),
            "DFLOCKD_MAX_LOCKS": str(MANY),
        }
        super().__init__(directory, name, variables)
        self._arguments = command

    def _command(self) -> Sequence[str]:
        return self._arguments

    def _after_start(self) -> None:
        def probe() -> bool | None:
            if not self.running:
                raise stage.StageError(self.with_log(f"{self.name} ended at once"))
            with contextlib.suppress(OSError):
                socket.create_connection((self.host, self.port), 1).close()
                return True
            return None

        stage.wait_until(probe, stage.WAIT, lambda: self.with_log(f"{self.name} does not listen"))


class TcpRedis(stage.Redis):
    """Redis that listens on loopback as well."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.port = free_port()

    def _command(self) -> Sequence[str]:
        # What comes last counts.
        return [*super()._command(), "--bind", "127.0.0.1", "--port", str(self.port)]


Server: TypeAlias = stage.LockServer | Other
S = TypeVar("S", stage.LockServer, Other)


def ours(
    bench: Bench,
    stack: ExitStack,
    *arguments: str,
    name: str = "dflockd",
    python: str | None = None,
    prefix: Sequence[str] = (),
) -> Server:
    """Start our server, compiled if it can be had, or in the interpreter that is named."""
    server = stage.LockServer(bench.directory, "--max-locks", str(MANY), *arguments, name=name)
    server.python = python or bench.python
    return _started(stack, server, prefix)


def all_in_python(bench: Bench, stack: ExitStack, prefix: Sequence[str] = ()) -> dict[str, Server]:
    """Start our server, what it is without a compiler, what it was before, and the floor."""
    bare = BareServer(bench.directory, name="bare")
    return {
        OURS: ours(bench, stack, prefix=prefix),
        **plain(bench, stack, prefix),
        **before(bench, stack, prefix),
        BARE: _started(stack, bare, prefix),
    }


def plain(bench: Bench, stack: ExitStack, prefix: Sequence[str] = ()) -> dict[str, Server]:
    """Start our server in plain Python, by its name; nothing if this interpreter has it compiled."""
    if interpreters.is_compiled(sys.executable):
        bench.left_out[PLAIN] = "the benchmarks themselves run where the server is compiled"
        return {}
    return {PLAIN: ours(bench, stack, name="plain", python=sys.executable, prefix=prefix)}


def before(bench: Bench, stack: ExitStack, prefix: Sequence[str] = ()) -> dict[str, Server]:
    """Start our server of an earlier commit, by its name; nothing if it cannot be had."""
    try:
        place = interpreters.before(bench.directory)
    except LeftOutError as exc:
        bench.left_out[BEFORE] = str(exc)
        return {}
    prefix = ["env", f"PYTHONPATH={place}", *prefix]
    return {BEFORE: ours(bench, stack, name="before", python=sys.executable, prefix=prefix)}


def go(bench: Bench, stack: ExitStack) -> dict[str, Server]:
    """Start the published server in Go, by its name; nothing if it cannot be had."""
    try:
        program = published.go()
    except LeftOutError as exc:
        bench.left_out[GO] = str(exc)
        return {}
    return {GO: _started(stack, Other(bench.directory, "go", str(program)))}


def _started(stack: ExitStack, server: S, prefix: Sequence[str] = ()) -> S:
    server.prefix = prefix
    return stack.enter_context(server)


def free_port() -> int:
    """Return a port of loopback that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
