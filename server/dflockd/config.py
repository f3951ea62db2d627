"""Settings: one table from which flags, variables, checks and help are made.

A setting comes from its environment variable, else from its flag, else from its default: the
environment wins, as it always has in dflockd. A bad value stops the server with one line.
"""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import logging
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dflockd.address import parse_server
from dflockd.cluster.parameters import MAX_LEASE, SERVING_LEASE, ClusterParameters
from dflockd.files import SecretFile, not_after, read_secret, refuse_irregular
from dflockd.server import ServerOptions, TlsContext
from dflockd.shards.credentials import EtcdTls, EtcdUser
from dflockd.shards.keys import SERVERS_PREFIX, Keys
from dflockd.shards.liveness import is_name
from dflockd.table import Limits
from dflockd.wire import MAX_SECONDS, MAX_SECRET

PREFIX = "DFLOCKD_"

logger = logging.getLogger("dflockd")


class SettingError(ValueError):
    """A setting is missing, malformed or contradicts another; the text is one line for people."""


@dataclass(frozen=True, slots=True)
class ValueKind:
    """What values a setting takes: how they are read and how they are described."""

    describe: str
    read: Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    flag: str
    variable: str
    default: Any
    kind: ValueKind
    help: str
    secret: bool = False

    @property
    def name(self) -> str:
        """The attribute under which `Settings` keeps it."""
        return self.flag.removeprefix("--").replace("-", "_")


def _number(lowest: int, highest: int) -> ValueKind:
    def read(text: str) -> int:
        digits = text.isascii() and text.isdigit() and len(text) <= 12
        if not digits or not lowest <= int(text) <= highest:
            raise ValueError
        return int(text)

    return ValueKind(f"a whole number from {lowest} to {highest}", read)


def _text(describe: str) -> ValueKind:
    def read(text: str) -> str:
        if not text or any(end in text for end in "\n\r\0"):
            raise ValueError
        return text

    return ValueKind(describe, read)


def _choice(*words: str) -> ValueKind:
    def read(text: str) -> str:
        for word in words:
            if word.lower() == text.lower():
                return word
        raise ValueError

    return ValueKind("one of " + ", ".join(words), read)


def _read_switch(text: str) -> bool:
    word = text.lower()
    if word in ("1", "yes", "true"):
        return True
    if word in ("0", "no", "false"):
        return False
    raise ValueError


def _read_mode(text: str) -> int:
    if not re.fullmatch("0?[0-7]{3}", text):
        raise ValueError
    return int(text, 8)


_MODE = ValueKind("three octal digits, such as 660", _read_mode)
_SWITCH = ValueKind("1, yes, true, 0, no or false", _read_switch)
_SECONDS = _number(1, MAX_SECONDS)
_SECONDS_OR_NEVER = _number(0, MAX_SECONDS)
_COUNT = _number(1, 1_000_000_000)
_COUNT_OR_ANY = _number(0, 1_000_000_000)
_FILE = _text("the path of a file")


def _read_cluster(text: str) -> tuple[str, ...]:
    scheme, found, rest = text.partition("://")
    endpoints = tuple(rest.rstrip("/").split(","))
    if not found or scheme != "etcd" or any(not re.fullmatch(r"[^\s/@]+", e) for e in endpoints):
        raise ValueError
    for endpoint in endpoints:
        parse_server(endpoint)
    return endpoints


def _read_host(text: str) -> str:
    address = parse_server((text, 1))
    if address.unix_path is not None or "\0" in text:
        raise ValueError
    return address.host


def _read_address(text: str) -> str:
    address = parse_server(text)
    if address.unix_path is not None or not is_name(str(address)):
        raise ValueError
    return str(address)


def _read_prefix(text: str) -> str:
    if not text.strip("/") or any(end in text for end in "\n\r\0"):
        raise ValueError
    Keys(text)
    return text


_PREFIX = ValueKind(f"a prefix of keys in etcd, such as {SERVERS_PREFIX}", _read_prefix)
_CLUSTER = ValueKind("etcd://host:2379, several separated by commas", _read_cluster)
_ADDRESS = ValueKind("host:port", _read_address)
_HOST = ValueKind("a host name or address, such as 127.0.0.1 or ::1", _read_host)

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "--host",
        "DFLOCKD_HOST",
        "0.0.0.0",
        _HOST,
        "Bind address; :: is every address, of IPv4 too",
    ),
    Setting("--port", "DFLOCKD_PORT", 6388, _number(0, 65535), "Bind port; 0 picks a free one"),
    Setting(
        "--default-lease-ttl",
        "DFLOCKD_DEFAULT_LEASE_TTL_S",
        33,
        _SECONDS,
        "Default lock lease duration (seconds)",
    ),
    Setting(
        "--lease-sweep-interval",
        "DFLOCKD_LEASE_SWEEP_INTERVAL_S",
        1,
        _SECONDS,
        "Longest sleep of the expiry timer (seconds); leases end on time in any case",
    ),
    Setting(
        "--gc-interval",
        "DFLOCKD_GC_LOOP_SLEEP",
        5,
        _SECONDS,
        "Accepted for compatibility: idle keys are dropped at once",
    ),
    Setting(
        "--gc-max-idle",
        "DFLOCKD_GC_MAX_UNUSED_TIME",
        60,
        _SECONDS_OR_NEVER,
        "Accepted for compatibility: idle keys are dropped at once",
    ),
    Setting(
        "--max-locks",
        "DFLOCKD_MAX_LOCKS",
        1024,
        _COUNT,
        "Maximum number of keys that are held or waited for",
    ),
    Setting(
        "--read-timeout",
        "DFLOCKD_READ_TIMEOUT_S",
        23,
        _SECONDS,
        "Read timeout inside a request (seconds); an idle client never times out",
    ),
    Setting(
        "--auto-release-on-disconnect",
        "DFLOCKD_AUTO_RELEASE_ON_DISCONNECT",
        True,
        _SWITCH,
        "Release locks when a client disconnects",
    ),
    Setting(
        "--max-waiters",
        "DFLOCKD_MAX_WAITERS",
        0,
        _COUNT_OR_ANY,
        "Maximum number of waiters of one key; 0 for no limit",
    ),
    Setting(
        "--max-holds",
        "DFLOCKD_MAX_HOLDS",
        10_000,
        _COUNT_OR_ANY,
        "Maximum number of locks of one connection, and of holders of one key; the same of "
        "reserved positions; 0 for no limit",
    ),
    Setting(
        "--max-rate-window",
        "DFLOCKD_MAX_RATE_WINDOW_S",
        86_400,
        _SECONDS,
        "Longest window of a rate (seconds); that of 10/m is 60",
    ),
    Setting(
        "--max-rate-runs",
        "DFLOCKD_MAX_RATE_RUNS",
        1_000_000,
        _COUNT,
        "Maximum number of runs that all rates together may allow in their windows; "
        "the server remembers each for one window",
    ),
    Setting(
        "--max-connections",
        "DFLOCKD_MAX_CONNECTIONS",
        0,
        _COUNT_OR_ANY,
        "Maximum number of client connections; 0 for as many as the open files allow",
    ),
    Setting(
        "--auth-timeout",
        "DFLOCKD_AUTH_TIMEOUT_S",
        10,
        _SECONDS,
        "Time for a client to complete TLS and send the auth token (seconds)",
    ),
    Setting(
        "--write-timeout",
        "DFLOCKD_WRITE_TIMEOUT_S",
        5,
        _SECONDS_OR_NEVER,
        "Drop a client that does not read its replies for this long (seconds); 0 for never",
    ),
    Setting(
        "--shutdown-timeout",
        "DFLOCKD_SHUTDOWN_TIMEOUT_S",
        8,
        _SECONDS_OR_NEVER,
        "Time for holders to release after SIGTERM (seconds); 0 waits forever",
    ),
    Setting(
        "--max-lease-ttl",
        "DFLOCKD_MAX_LEASE_TTL_S",
        3600,
        _SECONDS,
        "Longest lease that a client may ask for (seconds)",
    ),
    Setting(
        "--orphan-ttl",
        "DFLOCKD_ORPHAN_TTL_S",
        0,
        _SECONDS_OR_NEVER,
        "How long the locks of a connection that was reset wait for a renewal (seconds)",
    ),
    Setting(
        "--orphan-ttl-covers",
        "DFLOCKD_ORPHAN_TTL_COVERS",
        "reset",
        _choice("reset", "all"),
        "Which locks --orphan-ttl keeps: those of connections that were reset, or of all that end",
    ),
    Setting("--tls-cert", "DFLOCKD_TLS_CERT", None, _FILE, "TLS certificate chain (PEM)"),
    Setting("--tls-key", "DFLOCKD_TLS_KEY", None, _FILE, "TLS private key (PEM)"),
    Setting(
        "--tls-client-ca",
        "DFLOCKD_TLS_CLIENT_CA",
        None,
        _FILE,
        "Require client certificates signed by one of these authorities (PEM)",
    ),
    Setting(
        "--auth-token",
        "DFLOCKD_AUTH_TOKEN",
        None,
        _text(f"one line of up to {MAX_SECRET} bytes"),
        "Shared secret that clients must send; the process list shows it: prefer --auth-token-file",
        secret=True,
    ),
    Setting(
        "--auth-token-file",
        "DFLOCKD_AUTH_TOKEN_FILE",
        None,
        _FILE,
        "File that contains the shared secret in one line",
    ),
    Setting(
        "--state-dir",
        "DFLOCKD_STATE_DIR",
        None,
        _text("the path of a directory"),
        "Store the held locks in this directory, so that a restart loses none",
    ),
    Setting(
        "--state-recover",
        "DFLOCKD_STATE_RECOVER",
        False,
        _SWITCH,
        "If the state directory is damaged, wait for clients to renew their locks instead of "
        "refusing to start",
    ),
    Setting(
        "--cluster",
        "DFLOCKD_CLUSTER",
        None,
        _CLUSTER,
        "Form a cluster with the other servers that use this etcd",
    ),
    Setting(
        "--advertise",
        "DFLOCKD_ADVERTISE",
        None,
        _ADDRESS,
        "Address at which clients of the cluster reach this server",
    ),
    Setting(
        "--advertise-check",
        "DFLOCKD_ADVERTISE_CHECK",
        "strict",
        _choice("strict", "warn", "off"),
        "Check that --advertise leads to this server, before it joins the cluster and from time to "
        "time: join only if it does (strict), join anyway and log a warning (warn), do not check (off)",
    ),
    Setting(
        "--cluster-ca",
        "DFLOCKD_CLUSTER_CA",
        None,
        _FILE,
        "Speak TLS with etcd, whose certificate one of these authorities signed (PEM)",
    ),
    Setting(
        "--cluster-cert",
        "DFLOCKD_CLUSTER_CERT",
        None,
        _FILE,
        "Client certificate for etcd (PEM)",
    ),
    Setting(
        "--cluster-key", "DFLOCKD_CLUSTER_KEY", None, _FILE, "Private key of --cluster-cert (PEM)"
    ),
    Setting(
        "--cluster-user",
        "DFLOCKD_CLUSTER_USER",
        None,
        _text("the name of a user"),
        "User name for an etcd with users",
    ),
    Setting(
        "--cluster-password-file",
        "DFLOCKD_CLUSTER_PASSWORD_FILE",
        None,
        _FILE,
        "File that contains the password of --cluster-user in one line",
    ),
    Setting(
        "--cluster-prefix",
        "DFLOCKD_CLUSTER_PREFIX",
        SERVERS_PREFIX,
        _PREFIX,
        "Prefix of the cluster's keys in etcd",
    ),
    Setting(
        "--cluster-serving-lease",
        "DFLOCKD_CLUSTER_SERVING_LEASE_S",
        SERVING_LEASE,
        _number(2, 3600),
        "How long a server of a cluster continues without etcd before the others take over (seconds)",
    ),
    Setting(
        "--cluster-max-lease-ttl",
        "DFLOCKD_CLUSTER_MAX_LEASE_TTL_S",
        MAX_LEASE,
        _SECONDS,
        "Longest lease of a lock in a cluster, except detached ones (seconds). After a crash the "
        "shards of that server grant nothing for this time and one serving lease",
    ),
    Setting(
        "--cluster-rebalance",
        "DFLOCKD_CLUSTER_REBALANCE",
        False,
        _SWITCH,
        "Move shards automatically until all servers have about equally many",
    ),
    Setting(
        "--unix-socket",
        "DFLOCKD_UNIX_SOCKET",
        None,
        _text("the path of a socket"),
        "Unix socket to listen on in addition",
    ),
    Setting(
        "--unix-socket-mode",
        "DFLOCKD_UNIX_SOCKET_MODE",
        None,
        _MODE,
        "Permissions of the unix socket, which decide who may connect; by default the umask sets them",
    ),
    Setting(
        "--http-host",
        "DFLOCKD_HTTP_HOST",
        "127.0.0.1",
        _HOST,
        "Bind address for health checks, metrics and the live page",
    ),
    Setting(
        "--http-port",
        "DFLOCKD_HTTP_PORT",
        None,
        _number(0, 65535),
        "Port for health checks, metrics and the live page; without it there are none",
    ),
    Setting(
        "--log-level",
        "DFLOCKD_LOG_LEVEL",
        "INFO",
        _choice("DEBUG", "INFO", "WARNING", "ERROR"),
        "Lowest severity to log",
    ),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one server, checked each by itself and against each other."""

    values: Mapping[str, Any] = field(repr=False)
    auth_secret: bytes | SecretFile | None = field(repr=False)
    tls: TlsContext | None
    warnings: tuple[str, ...]

    def __getitem__(self, name: str) -> Any:
        """Return the value of the setting with that name, e.g. ``max_locks``."""
        return self.values[name]

    def limits(self) -> Limits:
        """What the table needs to know."""
        return Limits(
            default_lease=self["default_lease_ttl"],
            max_lease=self._max_lease,
            max_detached_lease=self["max_lease_ttl"],
            max_locks=self["max_locks"],
            max_waiters=self["max_waiters"],
            max_holds=self["max_holds"],
            max_rate_window=self["max_rate_window"],
            max_rate_runs=self["max_rate_runs"],
            auto_release=self["auto_release_on_disconnect"],
            orphan_ttl=self["orphan_ttl"],
            orphan_all=self["orphan_ttl_covers"] == "all",
        )

    def parameters(self) -> ClusterParameters:
        """What the servers of the cluster have to agree upon."""
        return ClusterParameters(
            serving_lease=self["cluster_serving_lease"], max_lease=self._max_lease
        )

    @property
    def _max_lease(self) -> int:
        longest: int = self["max_lease_ttl"]
        return longest if self["cluster"] is None else min(longest, self["cluster_max_lease_ttl"])

    def reload_tls(self) -> bool:
        """Read the certificates again, for new connections; return whether there are any.

        Raises:
            SettingError: they do not load; those from before stay.
        """
        if self.tls is None:
            return False
        new = _tls(self.values)
        assert new is not None
        self.tls.exchange(new)
        return True

    def good_until(self) -> dict[str, float]:
        """Return when certificates expire, in Unix time, by the names of their settings.

        Of its own the server says so of those that it shows, whatever is in their files.
        """
        return {
            **({} if self.tls is None else self.tls.current.good_until),
            **_good_until(self.values, "cluster_cert", "cluster_ca"),
        }

    def server_options(self) -> ServerOptions:
        """What the server needs to know."""
        return ServerOptions(
            host=self["host"],
            port=self["port"],
            unix_socket=self["unix_socket"],
            unix_socket_mode=self["unix_socket_mode"],
            read_timeout=self["read_timeout"],
            write_timeout=self["write_timeout"],
            shutdown_timeout=self["shutdown_timeout"],
            sweep_interval=self["lease_sweep_interval"],
            max_connections=self["max_connections"],
            auth_timeout=self["auth_timeout"],
            auth_secret=self.auth_secret,
            tls=self.tls,
        )


def load(arguments: Sequence[str], environ: Mapping[str, str], version: str) -> Settings:
    """Make the settings from the command line and the environment.

    Raises:
        SettingError: a value is bad; nothing has been started.
    """
    flags, unknown = _parser(version).parse_known_args(arguments)
    if unknown:
        raise SettingError(_unknown_argument(unknown[0]))
    values = {setting.name: _value(setting, flags, environ) for setting in SETTINGS}
    if values["default_lease_ttl"] > values["max_lease_ttl"]:
        raise SettingError(
            f"--default-lease-ttl is {values['default_lease_ttl']}, over --max-lease-ttl "
            f"{values['max_lease_ttl']}: lower the first or raise the second"
        )
    if values["state_recover"] and values["state_dir"] is None:
        raise SettingError("--state-recover is set and --state-dir is not: set both, or neither")
    if values["orphan_ttl_covers"] == "all" and not values["orphan_ttl"]:
        raise SettingError(
            "--orphan-ttl-covers is all and --orphan-ttl is 0, so that nothing is kept: "
            "set --orphan-ttl to some seconds"
        )
    if values["unix_socket_mode"] is not None and values["unix_socket"] is None:
        raise SettingError(
            "--unix-socket-mode is set and --unix-socket is not: set both, or neither"
        )
    _check_cluster(values)
    warnings = _unknown_variables(environ)
    if flags.auth_token is not None:
        warnings.append(
            "--auth-token shows the secret in the process list: "
            "use --auth-token-file or DFLOCKD_AUTH_TOKEN"
        )
    secret = _secret(values)
    if secret is None and values["tls_client_ca"] is None and not _is_loopback(values["host"]):
        warnings.append(
            f"anyone who can reach {values['host']} can take and release locks: "
            "set --auth-token-file, or --host 127.0.0.1"
        )
    if secret is None and values["http_port"] is not None and not _is_loopback(values["http_host"]):
        warnings.append(
            f"anyone who can reach {values['http_host']} can see who holds which lock: "
            "set --auth-token-file, or --http-host 127.0.0.1"
        )
    tls = _tls(values)
    if tls is not None:
        tls.renew = partial(_renew, tls, values, [_stamp(values)])
    if secret is not None and tls is None:
        warnings += _clear_text(values)
    return Settings(values, secret, tls, tuple(warnings))


def _clear_text(values: Mapping[str, Any]) -> list[str]:
    """Return warnings about where the secret can be read on its way."""
    hosts = [values["host"], values["http_host"] if values["http_port"] is not None else "::1"]
    return [
        f"the auth token travels in clear text to {host}: set --tls-cert and --tls-key, "
        f"or {flag} 127.0.0.1"
        for host, flag in zip(hosts, ("--host", "--http-host"), strict=True)
        if not _is_loopback(host)
    ]


def _check_cluster(values: Mapping[str, Any]) -> None:
    if values["cluster"] is None:
        names = ("ca", "cert", "key", "user", "password_file")
        for name in ("advertise", *(f"cluster_{name}" for name in names)):
            if values[name] is not None:
                flag = "--" + name.replace("_", "-")
                raise SettingError(f"{flag} is set and --cluster is not: set both, or neither")
        return
    if values["advertise"] is None:
        raise SettingError(
            "--advertise is not set: a server of a cluster must be told where clients reach it, "
            "as host:port"
        )
    if _is_any(parse_server(values["advertise"]).host):
        raise SettingError(
            f"--advertise is {values['advertise']}: that is each machine to itself, where clients look "
            "for their server then; write the name or address of this one"
        )
    if values["state_dir"] is not None:
        raise SettingError(
            "--state-dir and --cluster are both set: the servers of a cluster hand their locks over, "
            "and holders bring them back after a crash; unset --state-dir"
        )
    if values["default_lease_ttl"] > values["cluster_max_lease_ttl"]:
        raise SettingError(
            f"--default-lease-ttl is {values['default_lease_ttl']}, over --cluster-max-lease-ttl "
            f"{values['cluster_max_lease_ttl']}: lower the first or raise the second"
        )


def _is_any(host: str) -> bool:
    """Whether a host is ``0.0.0.0`` or ``::``: a client that connects there reaches its own machine."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return not host.strip("0.")  # such as 0, which the system takes for one
    mapped = getattr(found, "ipv4_mapped", None)
    return found.is_unspecified or (mapped is not None and mapped.is_unspecified)


def load_cluster(flags: argparse.Namespace, environ: Mapping[str, str]) -> Mapping[str, Any]:
    """Return where the cluster is that a command is about, by the names of the settings.

    Raises:
        SettingError: it is not said, or not in the right form.
    """
    values = {s.name: _value(s, flags, environ) for s in SETTINGS if s.name in vars(flags)}
    if values["cluster"] is None:
        raise SettingError("--cluster is not set: write --cluster etcd://host:2379")
    return values


def load_token(flags: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """Return the shared secret for a client: of a variable, or of the file that was named.

    Raises:
        SettingError: it cannot be read, or is said twice.
    """
    flags = argparse.Namespace(auth_token=None, auth_token_file=flags.auth_token_file)
    secret = _secret({s.name: _value(s, flags, environ) for s in SETTINGS if s.name in vars(flags)})
    if isinstance(secret, SecretFile):
        secret = secret.latest
    return secret.decode(errors="surrogateescape") if secret is not None else None


def read_etcd_tls(values: Mapping[str, Any] | Settings) -> EtcdTls | None:
    """Return what ``--cluster-ca``, ``-cert`` and ``-key`` name; ``None`` without any of them.

    Raises:
        SettingError: one of them is missing, or cannot be read.
    """
    names = ["cluster_ca", "cluster_cert", "cluster_key"]
    ca, cert, key = paths = [values[name] for name in names]
    if not any(paths):
        return None
    if ca is None or (cert is None) != (key is None):
        missing = names[0] if ca is None else names[1] if cert is None else names[2]
        raise SettingError(
            f"--{missing.replace('_', '-')} is not set: TLS with etcd needs --cluster-ca, and "
            "--cluster-cert and --cluster-key both or neither"
        )
    tls = EtcdTls(ca, cert, key)
    for name, path in zip(names, paths, strict=True):
        _check_file(name, path)
    return tls


def read_etcd_user(values: Mapping[str, Any] | Settings) -> EtcdUser | None:
    """Return whom ``--cluster-user`` and ``--cluster-password-file`` name; ``None`` without them.

    Raises:
        SettingError: one of them is missing, or the file cannot be read.
    """
    name, path = values["cluster_user"], values["cluster_password_file"]
    if name is None and path is None:
        return None
    if name is None or path is None:
        missing = "--cluster-user" if name is None else "--cluster-password-file"
        raise SettingError(f"{missing} is not set: a user of etcd has a name and a password")
    _one_line("--cluster-password-file", path)
    return EtcdUser(name, path)


def _check_file(name: str, path: str | None) -> None:
    """Refuse the file of a setting if it cannot be read.

    Raises:
        SettingError: it cannot.
    """
    try:
        refuse_irregular(path)
        if path is not None:
            Path(path).read_bytes()
    except OSError as exc:
        flag = "--" + name.replace("_", "-")
        raise SettingError(f"{flag}: {path!r} cannot be read: {exc.strerror}") from None


def _one_line(flag: str, path: str) -> str:
    """Return the secret in a file.

    Raises:
        SettingError: there is none, or it cannot be read.
    """
    try:
        return read_secret(path)
    except ValueError as exc:
        raise SettingError(f"{flag}: {path!r} {exc}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message} (--help lists the flags)")


def _parser(version: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dflockd",
        description="A lock server: FIFO locks and semaphores with leases.",
        epilog="A variable that is set wins over its flag. `dflockd cluster --help`: commands for "
        "a cluster. `dflockd top --help`: a live view of who holds what.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dflockd {version}")
    for setting in SETTINGS:
        default = "" if setting.default is None else f"; default {setting.default}"
        text = f"{setting.help} [{setting.variable}{default}]".replace("%", "%%")
        if setting.kind is _SWITCH:
            parser.add_argument(setting.flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(setting.flag, metavar="VALUE", help=text)
    return parser


def _value(setting: Setting, flags: argparse.Namespace, environ: Mapping[str, str]) -> Any:
    source, given = setting.variable, environ.get(setting.variable)
    if given is None:
        source, given = setting.flag, getattr(flags, setting.name)
    if given is None:
        return setting.default
    if isinstance(given, bool):
        return given
    try:
        return setting.kind.read(given)
    except ValueError:
        # A password can stand before an @.
        shown = "its value" if setting.secret or "@" in given else repr(given)
        hint = ""
        if setting.kind is _CLUSTER and "@" in given:
            hint = "; set --cluster-user and --cluster-password-file instead"
        elif not given:
            hint = "; unset it for the default"
        elif source == setting.variable and given.startswith("tcp://"):
            hint = "; Kubernetes sets it for a service named dflockd: enableServiceLinks: false"
        raise SettingError(f"{source}: {shown} is not {setting.kind.describe}{hint}") from None


def _unknown_argument(argument: str) -> str:
    # Only the name is shown: what stands behind a misspelt flag may be a secret.
    if not argument.startswith("-"):
        return "an argument belongs to no flag (--help lists the flags)"
    name = argument.partition("=")[0]
    near = difflib.get_close_matches(name, [setting.flag for setting in SETTINGS], 1)
    hint = f"did you mean {near[0]}?" if near else "--help lists the flags"
    return f"{name!r} is not a flag ({hint})"


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    known = [setting.variable for setting in SETTINGS]
    warnings = []
    for name in sorted(environ):
        # The names that Kubernetes makes for a service called dflockd are nobody's mistake.
        links = name.startswith((PREFIX + "PORT_", PREFIX + "SERVICE_"))
        if name.startswith(PREFIX) and name not in known and not links:
            near = difflib.get_close_matches(name, known, 1)
            hint = f": did you mean {near[0]}?" if near else ""
            warnings.append(f"{name} is not a setting{hint}")
    return warnings


def _secret(values: Mapping[str, Any]) -> bytes | SecretFile | None:
    token, path = values["auth_token"], values["auth_token_file"]
    if token is not None and path is not None:
        raise SettingError("--auth-token and --auth-token-file are both set: set one of them")
    if path is not None:
        _one_line("--auth-token-file", path)
        secret: bytes | SecretFile = SecretFile(path)
    elif token is not None:
        # A variable may hold bytes that are no text; clients can send them.
        secret = token.encode(errors="surrogateescape")
    else:
        return None
    if len(secret if isinstance(secret, bytes) else secret.latest) > MAX_SECRET:
        raise SettingError(f"--auth-token: over {MAX_SECRET} bytes long, clients cannot send it")
    return secret


def _tls(values: Mapping[str, Any]) -> TlsContext | None:
    cert, key, client_ca = values["tls_cert"], values["tls_key"], values["tls_client_ca"]
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        missing = "--tls-cert" if cert is None else "--tls-key"
        raise SettingError(f"{missing} is not set: TLS needs --tls-cert and --tls-key")
    context = TlsContext.new()
    try:
        refuse_irregular(cert, key)
        # With a password, if a wrong one: without, OpenSSL would ask for it at the terminal.
        context.load_cert_chain(cert, key, password="")
    except (OSError, ssl.SSLError) as exc:
        raise SettingError(f"--tls-cert {cert!r}, --tls-key {key!r} do not load: {exc}") from None
    if client_ca is not None:
        try:
            refuse_irregular(client_ca)
            context.load_verify_locations(client_ca)
        except (OSError, ssl.SSLError) as exc:
            raise SettingError(f"--tls-client-ca: {client_ca!r} does not load: {exc}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    context.good_until = _good_until(values, "tls_cert", "tls_client_ca")
    return context


def _good_until(values: Mapping[str, Any], *names: str) -> dict[str, float]:
    """Return when a certificate in the files of these settings expires first, by their names."""
    paths = {name.replace("_", "-"): values[name] for name in names if values[name] is not None}
    return {name: not_after(path) for name, path in paths.items()}


def _renew(tls: TlsContext, values: Mapping[str, Any], seen: list[object]) -> None:
    """Load the certificates if their files have changed since they were last looked at."""
    stamp = _stamp(values)
    if stamp == seen[0]:
        return
    seen[0] = stamp
    try:
        if (new := _tls(values)) is not None:
            tls.exchange(new)
    except SettingError as exc:  # one of two has been exchanged, perhaps
        logger.error("the certificates stay as they were: %s", exc)


def _stamp(values: Mapping[str, Any]) -> object:
    """Return what changes with the files of the certificates."""
    paths = [values[name] for name in ("tls_cert", "tls_key", "tls_client_ca")]
    try:
        found = [Path(path).stat() for path in paths if path is not None]
    except OSError:
        return None
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found]


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
