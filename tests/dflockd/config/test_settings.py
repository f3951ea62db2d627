"""Every setting from flag, variable and default; bad values."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dflockd.config import PREFIX, SETTINGS, Setting, SettingError
from dflockd.server import ServerOptions
from dflockd.table import Limits
from tests.dflockd.config.support import settings

# The names, variables and defaults that users rely on; the first nine are as old as dflockd.
DOCUMENTED: dict[str, tuple[str, Any]] = {
    "--host": ("DFLOCKD_HOST", "0.0.0.0"),
    "--port": ("DFLOCKD_PORT", 6388),
    "--default-lease-ttl": ("DFLOCKD_DEFAULT_LEASE_TTL_S", 33),
    "--lease-sweep-interval": ("DFLOCKD_LEASE_SWEEP_INTERVAL_S", 1),
    "--gc-interval": ("DFLOCKD_GC_LOOP_SLEEP", 5),
    "--gc-max-idle": ("DFLOCKD_GC_MAX_UNUSED_TIME", 60),
    "--max-locks": ("DFLOCKD_MAX_LOCKS", 1024),
    "--read-timeout": ("DFLOCKD_READ_TIMEOUT_S", 23),
    "--auto-release-on-disconnect": ("DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", True),
    "--max-waiters": ("DFLOCKD_MAX_WAITERS", 0),
    "--max-holds": ("DFLOCKD_MAX_HOLDS", 10_000),
    "--max-rate-window": ("DFLOCKD_MAX_RATE_WINDOW_S", 86_400),
    "--max-rate-runs": ("DFLOCKD_MAX_RATE_RUNS", 1_000_000),
    "--max-connections": ("DFLOCKD_MAX_CONNECTIONS", 0),
    "--auth-timeout": ("DFLOCKD_AUTH_TIMEOUT_S", 10),
    "--write-timeout": ("DFLOCKD_WRITE_TIMEOUT_S", 5),
    "--shutdown-timeout": ("DFLOCKD_SHUTDOWN_TIMEOUT_S", 8),
    "--max-lease-ttl": ("DFLOCKD_MAX_LEASE_TTL_S", 3600),
    "--orphan-ttl": ("DFLOCKD_ORPHAN_TTL_S", 0),
    "--orphan-ttl-covers": ("DFLOCKD_ORPHAN_TTL_COVERS", "reset"),
    "--tls-cert": ("DFLOCKD_TLS_CERT", None),
    "--tls-key": ("DFLOCKD_TLS_KEY", None),
    "--tls-client-ca": ("DFLOCKD_TLS_CLIENT_CA", None),
    "--auth-token": ("DFLOCKD_AUTH_TOKEN", None),
    "--auth-token-file": ("DFLOCKD_AUTH_TOKEN_FILE", None),
    "--state-dir": ("DFLOCKD_STATE_DIR", None),
    "--state-recover": ("DFLOCKD_STATE_RECOVER", False),
    "--cluster": ("DFLOCKD_CLUSTER", None),
    "--advertise": ("DFLOCKD_ADVERTISE", None),
    "--advertise-check": ("DFLOCKD_ADVERTISE_CHECK", "strict"),
    "--cluster-ca": ("DFLOCKD_CLUSTER_CA", None),
    "--cluster-cert": ("DFLOCKD_CLUSTER_CERT", None),
    "--cluster-key": ("DFLOCKD_CLUSTER_KEY", None),
    "--cluster-user": ("DFLOCKD_CLUSTER_USER", None),
    "--cluster-password-file": ("DFLOCKD_CLUSTER_PASSWORD_FILE", None),
    "--cluster-prefix": ("DFLOCKD_CLUSTER_PREFIX", "/dflockd"),
    "--cluster-serving-lease": ("DFLOCKD_CLUSTER_SERVING_LEASE_S", 10),
    "--cluster-max-lease-ttl": ("DFLOCKD_CLUSTER_MAX_LEASE_TTL_S", 60),
    "--cluster-rebalance": ("DFLOCKD_CLUSTER_REBALANCE", False),
    "--unix-socket": ("DFLOCKD_UNIX_SOCKET", None),
    "--unix-socket-mode": ("DFLOCKD_UNIX_SOCKET_MODE", None),
    "--http-host": ("DFLOCKD_HTTP_HOST", "127.0.0.1"),
    "--http-port": ("DFLOCKD_HTTP_PORT", None),
    "--log-level": ("DFLOCKD_LOG_LEVEL", "INFO"),
}

# Settings that say so themselves when 0 means something.
ZERO_IS_FINE = {
    "--port",
    "--gc-max-idle",
    "--max-waiters",
    "--max-holds",
    "--max-connections",
    "--write-timeout",
    "--shutdown-timeout",
    "--orphan-ttl",
}

rows = pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.name)

numbers = pytest.mark.parametrize(
    "row", [row for row in SETTINGS if type(row.default) is int], ids=lambda row: row.name
)


def two_values(row: Setting, files: Path) -> tuple[dict[str, str], list[tuple[str, Any]]]:
    """Return what else must be set with a setting, and two texts for it with their values."""
    tls = {"DFLOCKD_TLS_CERT": str(files / "cert"), "DFLOCKD_TLS_KEY": str(files / "key")}
    copies = []
    for original in ("cert", "key", "secret"):
        copy = files / f"{original}-2"
        shutil.copy(files / original, copy)
        copies.append(copy)
    cert, key, secret = copies
    cluster = {"DFLOCKD_CLUSTER": "etcd://e", "DFLOCKD_ADVERTISE": "h:1"}
    paths: dict[str, tuple[dict[str, str], list[Path]]] = {
        "--tls-cert": (tls, [files / "cert", cert]),
        "--tls-key": (tls, [files / "key", key]),
        "--tls-client-ca": (tls, [files / "cert", cert]),
        "--auth-token-file": ({}, [files / "secret", secret]),
        "--state-dir": ({}, [files / "d1", files / "d2"]),
        "--unix-socket": ({}, [files / "s1", files / "s2"]),
        "--cluster-ca": (cluster, [files / "cert", cert]),
        "--cluster-cert": (cluster, [files / "cert", cert]),
        "--cluster-key": (cluster, [files / "key", key]),
        "--cluster-password-file": (cluster, [files / "secret", secret]),
    }
    if row.flag == "--unix-socket-mode":
        return {"DFLOCKD_UNIX_SOCKET": "s"}, [("660", 0o660), ("0700", 0o700)]
    if row.flag in paths:
        others, values = paths[row.flag]
        others = {name: value for name, value in others.items() if name != row.variable}
        return others, [(str(path), str(path)) for path in values]
    if row.flag == "--advertise-check":
        return cluster, [("off", "off"), ("Warn", "warn")]
    if row.flag == "--cluster-user":
        return cluster, [("locks", "locks"), ("Other", "Other")]
    if row.flag == "--state-recover":
        return {"DFLOCKD_STATE_DIR": str(files / "d1")}, [("0", False), ("yes", True)]
    if type(row.default) is int:
        return {}, [("41", 41), ("42", 42)]
    if row.variable in cluster:
        others = {name: value for name, value in cluster.items() if name != row.variable}
        if row.flag == "--cluster":
            return others, [("etcd://e", ("e",)), ("etcd://e:2379,f:1", ("e:2379", "f:1"))]
        return others, [("h:1", "h:1"), ("[::1]:6388", "[::1]:6388")]
    if row.flag == "--orphan-ttl-covers":
        return {"DFLOCKD_ORPHAN_TTL_S": "5"}, [("all", "all"), ("RESET", "reset")]
    special: dict[str, list[tuple[str, Any]]] = {
        "--cluster-prefix": [("/a", "/a"), ("/b", "/b")],
        "--cluster-rebalance": [("0", False), ("yes", True)],
        "--host": [("127.0.0.1", "127.0.0.1"), ("::1", "::1")],
        "--http-host": [("127.0.0.2", "127.0.0.2"), ("::1", "::1")],
        "--http-port": [("41", 41), ("42", 42)],
        "--auth-token": [("one", "one"), ("two", "two")],
        "--log-level": [("debug", "DEBUG"), ("ERROR", "ERROR")],
        "--auto-release-on-disconnect": [("0", False), ("yes", True)],
    }
    return {}, special[row.flag]


def as_flag(row: Setting, text: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [row.flag if value else row.flag.replace("--", "--no-", 1)]
    return [row.flag, text]


def test_the_table_is_the_documented_one() -> None:
    assert {row.flag: (row.variable, row.default) for row in SETTINGS} == DOCUMENTED
    assert all(row.variable.startswith(PREFIX) for row in SETTINGS)


def test_defaults() -> None:
    given = settings()
    assert dict(given.values) == {row.name: row.default for row in SETTINGS}
    assert given.limits() == Limits()
    assert given.server_options() == ServerOptions()
    assert given.auth_secret is None
    assert given.tls is None


def test_what_is_covered_needs_a_time() -> None:
    assert settings("--orphan-ttl", "5", "--orphan-ttl-covers", "all").limits().orphan_all
    assert not settings("--orphan-ttl", "5").limits().orphan_all
    with pytest.raises(SettingError, match="--orphan-ttl to some seconds"):
        settings("--orphan-ttl-covers", "all")
    assert settings("--max-holds", "7").limits().max_holds == 7
    assert settings("--max-rate-window", "7").limits().max_rate_window == 7
    assert settings("--max-rate-runs", "7").limits().max_rate_runs == 7


@rows
def test_flag_variable_and_which_wins(row: Setting, files: Path) -> None:
    others, ((text, value), (text2, value2)) = two_values(row, files)
    assert settings(**others, **{row.variable: text})[row.name] == value
    assert settings(**others, **{row.variable: text2})[row.name] == value2
    assert settings(*as_flag(row, text, value), **others)[row.name] == value
    assert settings(*as_flag(row, text2, value2), **others)[row.name] == value2
    # The environment wins over the flag.
    both = settings(*as_flag(row, text2, value2), **others, **{row.variable: text})
    assert both[row.name] == value


@rows
def test_a_setting_changes_nothing_else(row: Setting, files: Path) -> None:
    others, ((text, _), _) = two_values(row, files)
    given = settings(**others, **{row.variable: text})
    names = {row.name} | {r.name for r in SETTINGS if r.variable in others}
    assert {n: v for n, v in given.values.items() if n not in names} == {
        r.name: r.default for r in SETTINGS if r.name not in names
    }


@rows
def test_names_without_the_prefix_mean_nothing(row: Setting) -> None:
    stray = {row.variable.removeprefix(PREFIX): "7"}
    assert settings(**stray)[row.name] == row.default


def check_refused(row: Setting, text: str, *, flag: bool) -> None:
    arguments = [f"{row.flag}={text}"] if flag else []
    environ = {} if flag else {row.variable: text}
    with pytest.raises(SettingError) as caught:
        settings(*arguments, **environ)
    message = str(caught.value)
    assert "\n" not in message
    assert (row.flag if flag else row.variable) in message
    assert row.kind.describe in message
    if not row.secret:
        assert repr(text) in message


@pytest.mark.parametrize("text", ["", "rw", "66", "8", "1777", "0o660", "-60"])
def test_the_mode_of_the_unix_socket_is_octal(text: str) -> None:
    row = next(row for row in SETTINGS if row.flag == "--unix-socket-mode")
    for flag in (True, False):
        check_refused(row, text, flag=flag)


def test_a_mode_without_a_unix_socket_is_refused() -> None:
    with pytest.raises(SettingError, match=r"--unix-socket is not: set both"):
        settings("--unix-socket-mode", "660")


@numbers
@pytest.mark.parametrize("text", ["", "abc", "-1", "+5", "1.5", "1_0", "٣", "9" * 30, " 5", "1e3"])
def test_bad_numbers(row: Setting, text: str) -> None:
    check_refused(row, text, flag=True)
    check_refused(row, text, flag=False)


@numbers
def test_zero(row: Setting) -> None:
    if row.flag in ZERO_IS_FINE:
        assert settings(row.flag, "0")[row.name] == 0
    else:
        check_refused(row, "0", flag=True)


@rows
@pytest.mark.parametrize("text", ["", "two\nlines", "two\rlines"])
def test_values_that_are_never_right(row: Setting, text: str) -> None:
    check_refused(row, text, flag=False)


@pytest.mark.parametrize("text", ["[::1]", "127.0.0.1:80", "a b", "unix:/a", "::g"])
@pytest.mark.parametrize("flag", ["--host", "--http-host"])
def test_a_host_is_no_more_than_that(flag: str, text: str) -> None:
    check_refused(next(row for row in SETTINGS if row.flag == flag), text, flag=True)


@pytest.mark.parametrize("text", ["maybe", "2", "on", "TRUE "])
def test_bad_switch(text: str) -> None:
    row = next(row for row in SETTINGS if row.default is True)
    check_refused(row, text, flag=False)


@pytest.mark.parametrize(
    ("text", "value"), [("TRUE", True), ("Yes", True), ("1", True), ("no", False), ("FALSE", False)]
)
def test_switch(text: str, value: bool) -> None:
    given = settings(DFLOCKD_AUTO_RELEASE_ON_DISCONNECT=text)
    assert given["auto_release_on_disconnect"] is value
    assert given.limits().auto_release is value


def test_port_of_a_kubernetes_service_gets_a_hint() -> None:
    with pytest.raises(SettingError, match="enableServiceLinks"):
        settings(DFLOCKD_PORT="tcp://10.0.0.1:6388")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prot", "1"], ["'--prot'", "did you mean --port"]),
        (["--nonsense=s3cret"], ["'--nonsense'", "--help"]),
        (["--auth-tokn", "s3cret"], ["'--auth-tokn'", "--auth-token"]),
        (["s3cret"], ["--help"]),
        (["--port"], ["--port"]),
        (["--max", "5"], ["'--max'"]),
    ],
)
def test_bad_arguments(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        settings(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert "s3cret" not in message
    assert all(word in message for word in words), message
