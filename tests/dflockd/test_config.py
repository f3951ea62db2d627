"""Every setting from flag, variable and default; bad values; settings against each other."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dflockd
from dflockd.config import (
    PREFIX,
    SETTINGS,
    Setting,
    SettingError,
    Settings,
    load,
    read_etcd_tls,
    read_etcd_user,
)
from dflockd.server import ServerOptions
from dflockd.shards.tls import EtcdTls
from dflockd.shards.user import EtcdUser
from dflockd.table import Limits

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


def settings(*arguments: str, **environ: str) -> Settings:
    return load(arguments, environ, "1.2.3")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a certificate, its key, the key encrypted, and a secret."""
    where = tmp_path_factory.mktemp("config")
    (where / "secret").write_text("open sesame\n")
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not on PATH")
    for command in (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=x"
        " -keyout key -out cert",
        "ec -in key -aes128 -passout pass:secret -out locked-key",
    ):
        subprocess.run([openssl, *command.split()], cwd=where, check=True, capture_output=True)
    return where


def two_values(row: Setting, files: Path) -> tuple[dict[str, str], list[tuple[str, Any]]]:
    """Return what else must be set with a setting, and two texts for it with their values."""
    tls = {
        "DFLOCKD_TLS_CERT": str(files / "cert"),
        "DFLOCKD_TLS_KEY": str(files / "key"),
    }
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


# Settings against each other.


def test_the_default_lease_must_be_within_the_cap() -> None:
    assert settings("--default-lease-ttl", "60", "--max-lease-ttl", "60").limits().max_lease == 60
    with pytest.raises(SettingError, match=r"--default-lease-ttl is 61.*--max-lease-ttl 60"):
        settings("--default-lease-ttl", "61", "--max-lease-ttl", "60")


def test_secret_sources(files: Path, tmp_path: Path) -> None:
    assert settings(DFLOCKD_AUTH_TOKEN="open sesame").auth_secret == b"open sesame"
    assert settings("--auth-token-file", str(files / "secret")).auth_secret == b"open sesame"
    assert settings(DFLOCKD_AUTH_TOKEN="\udcff").auth_secret == b"\xff"
    assert settings(DFLOCKD_AUTH_TOKEN="s" * 65536).auth_secret == b"s" * 65536
    with pytest.raises(SettingError, match="both set"):
        settings("--auth-token", "x", "--auth-token-file", str(files / "secret"))
    with pytest.raises(SettingError, match="65536"):
        settings(DFLOCKD_AUTH_TOKEN="s" * 65537)
    for number, text in enumerate(["", "\n", "two\nlines\n", "a\0b"]):
        path = tmp_path / f"secret{number}"
        path.write_text(text)
        with pytest.raises(SettingError, match="must hold one line"):
            settings("--auth-token-file", str(path))
    with pytest.raises(SettingError, match="cannot be read"):
        settings("--auth-token-file", str(tmp_path / "absent"))


def test_secrets_are_shown_nowhere(files: Path) -> None:
    given = settings(DFLOCKD_AUTH_TOKEN="open sesame")
    assert "sesame" not in repr(given.server_options())
    assert "sesame" not in repr(given)
    with pytest.raises(SettingError) as caught:
        settings(DFLOCKD_AUTH_TOKEN="open\nsesame")
    assert "sesame" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_tls(files: Path) -> None:
    cert, key = str(files / "cert"), str(files / "key")
    context = settings("--tls-cert", cert, "--tls-key", key).tls
    assert context is not None
    assert context.verify_mode is ssl.CERT_NONE
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    context = settings("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", cert).tls
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED


def test_bad_tls(files: Path) -> None:
    cert, key = str(files / "cert"), str(files / "key")
    for arguments, words in (
        (["--tls-cert", cert], "--tls-key is not set"),
        (["--tls-key", key], "--tls-cert is not set"),
        (["--tls-client-ca", cert], "--tls-cert is not set"),
        (["--tls-cert", cert, "--tls-key", "absent"], "absent"),
        (["--tls-cert", key, "--tls-key", key], "do not load"),
        (["--tls-cert", cert, "--tls-key", cert], "do not load"),
        # Asking for the password at the terminal would hang the start of a service.
        (["--tls-cert", cert, "--tls-key", str(files / "locked-key")], "do not load"),
        (["--tls-cert", cert, "--tls-key", key, "--tls-client-ca", key], "--tls-client-ca"),
        (["--tls-cert", cert, "--tls-key", key, "--tls-client-ca", "absent"], "absent"),
    ):
        with pytest.raises(SettingError, match=words) as caught:
            settings(*arguments)
        assert "\n" not in str(caught.value)


def warned(*arguments: str, **environ: str) -> str:
    return "; ".join(settings(*arguments, **environ).warnings)


def test_d17_open_to_the_network_without_a_secret_is_warned_about(files: Path) -> None:
    # D17: it listened everywhere, without authentication, and said nothing.
    assert "--auth-token-file" in warned()
    assert "0.0.0.0" in warned()
    assert warned("--host", "127.0.0.1") == ""
    assert warned("--host", "::1") == ""
    assert warned("--host", "localhost") == ""
    assert "::" in warned("--host", "::")
    assert "--auth-token-file" not in warned(DFLOCKD_AUTH_TOKEN="x")
    tls = ("--tls-cert", str(files / "cert"), "--tls-key", str(files / "key"))
    assert "--auth-token-file" in warned(*tls)
    assert warned(*tls, "--tls-client-ca", str(files / "cert")) == ""


def test_a_secret_in_clear_text_is_warned_about(files: Path) -> None:
    secret = ("--auth-token-file", str(files / "secret"))
    assert "clear text to 0.0.0.0: set --tls-cert" in warned(*secret)
    local = (*secret, "--host", "127.0.0.1")
    assert warned(*local) == ""
    assert warned(*local, "--http-host", "0.0.0.0") == ""
    http = warned(*local, "--http-host", "::", "--http-port", "0")
    assert "clear text to ::" in http
    assert "--http-host 127.0.0.1" in http
    tls = ("--tls-cert", str(files / "cert"), "--tls-key", str(files / "key"))
    assert warned(*secret, *tls, "--http-host", "0.0.0.0", "--http-port", "0") == ""


def test_a_secret_on_the_command_line_is_warned_about() -> None:
    assert "process list" in warned("--auth-token", "x")


def test_unknown_variables_are_warned_about() -> None:
    text = warned("--host", "127.0.0.1", DFLOCKD_MAX_LOCK="5", DFLOCKD_SERVICE_HOST="x")
    assert text == "DFLOCKD_MAX_LOCK is not a setting: did you mean DFLOCKD_MAX_LOCKS?"


# The process.


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
    return subprocess.run(
        [sys.executable, "-m", "dflockd", *arguments],
        env={**clean, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["--port", "abc"], {}, ["--port", "'abc'", "0 to 65535"]),
        (["--host", ""], {}, ["--host", "''"]),
        ([], {"DFLOCKD_MAX_LOCKS": "0"}, ["DFLOCKD_MAX_LOCKS", "'0'", "1 to"]),
        ([], {"DFLOCKD_AUTH_TOKEN": "s3cret\nx"}, ["DFLOCKD_AUTH_TOKEN", "one line"]),
        (["--auth-tokn", "s3cret"], {}, ["--auth-tokn"]),
        (["s3cret\nx"], {}, ["--help"]),
        (["--port", "a\nb"], {}, ["--port", r"'a\nb'"]),
        (["--auth-token", "s3cret", "--auth-token-file", "x"], {}, ["both set"]),
        (["--auth-token-file", "/absent"], {}, ["/absent"]),
        (["--tls-cert", "/absent"], {}, ["--tls-key"]),
    ],
)
def test_a_bad_setting_ends_with_one_line(
    arguments: list[str], environ: dict[str, str], words: list[str]
) -> None:
    ended = run(*arguments, **environ)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("dflockd: ")
    assert "s3cret" not in ended.stderr
    assert all(word in ended.stderr for word in words), ended.stderr


def test_help_lists_every_setting() -> None:
    ended = run("--help", COLUMNS="200")
    assert ended.returncode == 0
    assert all(row.flag in ended.stdout and row.variable in ended.stdout for row in SETTINGS)


def test_version() -> None:
    ended = run("--version")
    assert ended.returncode == 0
    build = "compiled" if dflockd.compiled else "pure Python"
    assert ended.stdout == f"dflockd {dflockd.__version__} ({build})\n"


CLUSTER = {"DFLOCKD_CLUSTER": "etcd://e:2379", "DFLOCKD_ADVERTISE": "h:1"}


@pytest.mark.parametrize(
    "url",
    ["e:2379", "redis://e", "etcd://", "etcd://e,,f", "etcd://u:p@e", "etcd://e f", "etcd:/e"],
)
def test_where_the_cluster_is_must_be_an_etcd(url: str) -> None:
    with pytest.raises(SettingError, match=r"DFLOCKD_CLUSTER: .*etcd://host:2379"):
        settings(**CLUSTER | {"DFLOCKD_CLUSTER": url})


@pytest.mark.parametrize("address", ["h:0", "unix:/s", "h:x", "a b:1", ":1"])
def test_an_address_that_nobody_could_reach_is_refused(address: str) -> None:
    with pytest.raises(SettingError, match=r"DFLOCKD_ADVERTISE: .* is not host:port"):
        settings(**CLUSTER | {"DFLOCKD_ADVERTISE": address})


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "[::]", "[0:0::0]", "[::ffff:0.0.0.0]"])
def test_an_address_that_is_each_machine_to_itself_is_refused(host: str) -> None:
    with pytest.raises(SettingError, match=r"--advertise is .*: that is each machine to itself"):
        settings(**CLUSTER | {"DFLOCKD_ADVERTISE": f"{host}:6388"})


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        ({"DFLOCKD_CLUSTER": "etcd://e"}, "--advertise is not set"),
        ({"DFLOCKD_ADVERTISE": "h:1"}, "--cluster is not"),
        (CLUSTER | {"DFLOCKD_STATE_DIR": "d"}, "--state-dir and --cluster are both set"),
        (CLUSTER | {"DFLOCKD_CLUSTER_MAX_LEASE_TTL_S": "9"}, "--default-lease-ttl is 33, over"),
    ],
)
def test_what_does_not_go_with_a_cluster(environ: dict[str, str], error: str) -> None:
    with pytest.raises(SettingError, match=error):
        settings(**environ)


def test_leases_in_a_cluster_are_short_unless_they_are_detached() -> None:
    limits = settings(**CLUSTER).limits()
    assert (limits.max_lease, limits.max_detached_lease) == (60, 3600)
    shorter = settings(**CLUSTER, DFLOCKD_MAX_LEASE_TTL_S="40")
    assert (shorter.limits().max_lease, shorter.parameters().max_lease) == (40, 40)


def test_a_user_of_etcd_has_a_name_and_a_password(files: Path) -> None:
    name, path = {"DFLOCKD_CLUSTER_USER": "u"}, files / "secret"
    file = {"DFLOCKD_CLUSTER_PASSWORD_FILE": str(path)}
    assert read_etcd_user(settings(**CLUSTER)) is None
    assert read_etcd_user(settings(**CLUSTER, **name, **file)) == EtcdUser(
        "u", path.read_text().strip()
    )
    with pytest.raises(SettingError, match="--cluster-password-file is not set"):
        read_etcd_user(settings(**CLUSTER, **name))
    with pytest.raises(SettingError, match="--cluster-user is not set"):
        read_etcd_user(settings(**CLUSTER, **file))
    file["DFLOCKD_CLUSTER_PASSWORD_FILE"] = "/nowhere"
    with pytest.raises(SettingError, match="--cluster-password-file: '/nowhere' cannot be read"):
        read_etcd_user(settings(**CLUSTER, **name, **file))


def test_tls_with_etcd_needs_all_of_it(files: Path) -> None:
    cert, key = str(files / "cert"), str(files / "key")
    given = settings(**CLUSTER)
    assert read_etcd_tls(given) is None
    given = settings(**CLUSTER, DFLOCKD_CLUSTER_CA=cert)
    assert read_etcd_tls(given) == EtcdTls((files / "cert").read_bytes(), None, None)
    for names, missing in (
        ({"DFLOCKD_CLUSTER_CERT": cert, "DFLOCKD_CLUSTER_KEY": key}, "--cluster-ca"),
        ({"DFLOCKD_CLUSTER_CA": cert, "DFLOCKD_CLUSTER_CERT": cert}, "--cluster-key"),
        ({"DFLOCKD_CLUSTER_CA": cert, "DFLOCKD_CLUSTER_KEY": key}, "--cluster-cert"),
    ):
        with pytest.raises(SettingError, match=f"{missing} is not set"):
            read_etcd_tls(settings(**CLUSTER, **names))
    with pytest.raises(SettingError, match=r"--cluster-ca: '/nowhere' cannot be read"):
        read_etcd_tls(settings(**CLUSTER, DFLOCKD_CLUSTER_CA="/nowhere"))
    with pytest.raises(SettingError, match="--cluster-ca is set and --cluster is not"):
        settings(DFLOCKD_CLUSTER_CA=cert)


def test_recovering_what_is_not_there() -> None:
    with pytest.raises(SettingError, match="--state-recover is set and --state-dir is not"):
        settings("--state-recover")


def test_a_former_name_means_the_same() -> None:
    assert load(["--cluster-promise", "7"], {}, "1")["cluster_serving_lease"] == 7
    environ = {"DFLOCKD_CLUSTER_PROMISE_S": "8"}
    flags = ["--cluster-serving-lease", "7", "--host", "127.0.0.1"]
    settings = load(flags, environ, "1")
    assert settings["cluster_serving_lease"] == 8
    assert not settings.warnings
    with pytest.raises(SettingError, match=r"^DFLOCKD_CLUSTER_PROMISE_S: 'x' is not a whole"):
        load([], {"DFLOCKD_CLUSTER_PROMISE_S": "x"}, "1")
    both = environ | {"DFLOCKD_CLUSTER_SERVING_LEASE_S": "9"}
    with pytest.raises(SettingError, match="both are set"):
        load([], both, "1")
    assert load([], dict.fromkeys(both, "9"), "1")["cluster_serving_lease"] == 9
