"""Where a server is."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from dflockd.errors import InvalidArgumentError, shown

DEFAULT_PORT = 6388
UNIX_PREFIX = "unix:"
CLUSTER_PREFIX = "cluster://"

ServerLike: TypeAlias = "tuple[str, int] | str"
"""``(host, port)``, ``"host:port"``, ``"host"``, ``"[::1]:port"`` or ``"unix:/path"``."""


class Address(NamedTuple):
    """A server's host and port, or the path of its unix socket (then the port is 0)."""

    host: str
    port: int

    @property
    def unix_path(self) -> str | None:
        """The path of the unix socket, or ``None`` for TCP."""
        return self.host.removeprefix(UNIX_PREFIX) if self.host.startswith(UNIX_PREFIX) else None

    def __str__(self) -> str:
        """Return ``host:port``, ``[host]:port`` for IPv6, or ``unix:path``."""
        if self.unix_path is not None:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Servers(tuple[Address, ...]):
    """A list of servers that has been checked: what `parse_servers` returns."""

    __slots__ = ()


class Seeds(Servers):
    """Some servers of a cluster: any of them knows which server has which key."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return ``cluster://host:port,...``."""
        return CLUSTER_PREFIX + ",".join(map(str, self))


def parse_server(server: ServerLike) -> Address:
    """Turn a server as people write it into an address.

    Raises:
        InvalidArgumentError: it is malformed.
    """
    if isinstance(server, str):
        if server.startswith(CLUSTER_PREFIX):
            raise InvalidArgumentError(
                f"server {shown(server)} is a cluster: give it alone, as servers='cluster://host:port,...'"
            )
        if server.startswith(UNIX_PREFIX):
            host, port = server, 0
        else:
            host, port = _split(server)
    else:
        if not isinstance(server, tuple | list):
            raise _bad(server)  # of a set, who knows which is the host
        try:
            host, port = server
        except (TypeError, ValueError):
            raise _bad(server) from None
    if not isinstance(host, str) or not isinstance(port, int) or isinstance(port, bool):
        raise _bad(server)
    if host == UNIX_PREFIX or host.split() != [host]:
        raise _bad(server)
    if host.startswith(UNIX_PREFIX):
        return Address(host, 0)
    if not 1 <= port <= 65535 or "[" in host or "]" in host:
        raise _bad(server)
    if ":" in host:
        try:
            host = _usual(host)
        except (OSError, ValueError):
            raise _bad(server) from None
    return Address(host, port)


def parse_servers(servers: Sequence[ServerLike] | str) -> Servers:
    """Turn a list of servers into addresses, in the same order: the order decides where keys live.

    The text ``cluster://host:port,...`` gives `Seeds`, whose order does not matter.

    Raises:
        InvalidArgumentError: the list is empty, names a server twice, or contains a malformed one.
    """
    if type(servers) is list and len(servers) == 1:
        # As most programs have it: looked at once.
        only = servers[0]
        if type(only) is str:
            return _named(only)
        if type(only) is tuple:
            try:
                return _only(*only)
            except TypeError:
                pass  # there is no hash of it, and it is no server
    if isinstance(servers, Servers):
        return servers
    if isinstance(servers, str) and servers.startswith(CLUSTER_PREFIX):
        named = [name.strip() for name in servers.removeprefix(CLUSTER_PREFIX).split(",")]
        if "" in named:
            raise InvalidArgumentError(
                f"servers is {shown(servers)}: name one or more servers of the cluster, "
                f"as in {CLUSTER_PREFIX}lock-1:{DEFAULT_PORT},lock-2:{DEFAULT_PORT}"
            )
        return _distinct(Seeds(map(parse_server, named)))
    # The order decides where keys live: a set has another one in each process.
    if isinstance(servers, str | bytes) or not isinstance(servers, Sequence) or not servers:
        raise InvalidArgumentError(
            f"servers is {shown(servers)}: give a list, such as [('127.0.0.1', {DEFAULT_PORT})], "
            f"or the text '{CLUSTER_PREFIX}host:port,...'"
        )
    return _distinct(Servers(map(parse_server, servers)))


# By the types of what is given, too: 1.0 is no port.
@lru_cache(maxsize=256, typed=True)
def _only(*server: Any) -> Servers:
    return Servers((parse_server(server),))


@lru_cache(maxsize=256)
def _named(server: str) -> Servers:
    return Servers((parse_server(server),))


def _distinct(addresses: Servers) -> Servers:
    if len(addresses) > 1 and len(set(addresses)) < len(addresses):
        twice = next(each for each in addresses if addresses.count(each) > 1)
        raise InvalidArgumentError(f"servers names one server twice: {shown(str(twice))}")
    return addresses


def _split(text: str) -> tuple[str, int]:
    host, port = text, ""
    if text.startswith("["):
        host, closed, port = text[1:].partition("]")
        if not closed or (port and not port.startswith(":")):
            raise _bad(text)
        port = port[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
        if not port:
            raise _bad(text)
    elif ":" in text:
        raise _bad(text)
    if port and not (port.isascii() and port.isdigit()):
        raise _bad(text)
    return host, int(port) if port else DEFAULT_PORT


def _usual(host: str) -> str:
    """Return an address of IPv6 as it is usually written: one server has one name.

    Raises:
        OSError, ValueError: it is none.
    """
    number, percent, zone = host.partition("%")
    packed = socket.inet_pton(socket.AF_INET6, number)
    return socket.inet_ntop(socket.AF_INET6, packed) + percent + zone


def _bad(server: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"server {shown(server)} is malformed: "
        "write (host, port), 'host:port', '[::1]:port' or 'unix:/path'"
    )
