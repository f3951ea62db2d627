"""Settings against each other, and what the process makes of them."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

import dflockd
from dflockd.cli import main
from dflockd.config import PREFIX, SETTINGS, SettingError, read_etcd_tls, read_etcd_user
from dflockd.files import SecretFile
from dflockd.shards.credentials import EtcdTls, EtcdUser
from tests import forkserver
from tests.dflockd.config.support import settings

# Settings against each other.


def test_the_default_lease_must_be_within_the_cap() -> None:
    assert settings("--default-lease-ttl", "60", "--max-lease-ttl", "60").limits().max_lease == 60
    with pytest.raises(SettingError, match=r"--default-lease-ttl is 61.*--max-lease-ttl 60"):
        settings("--default-lease-ttl", "61", "--max-lease-ttl", "60")


def test_secret_sources(files: Path, tmp_path: Path) -> None:
    assert settings(DFLOCKD_AUTH_TOKEN="open sesame").auth_secret == b"open sesame"
    in_file = settings("--auth-token-file", str(files / "secret")).auth_secret
    assert isinstance(in_file, SecretFile)
    assert in_file.read() == b"open sesame"
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
    (tmp_path / "bytes").write_bytes(b"open \xe9sesame")
    with pytest.raises(SettingError, match="is not UTF-8 text") as failure:
        settings("--auth-token-file", str(tmp_path / "bytes"))
    assert "e9" not in str(failure.value), "no part of it is shown"


@pytest.mark.parametrize(
    "flag",
    [
        *("--auth-token-file", "--tls-cert", "--tls-key", "--tls-client-ca"),
        *("--cluster-ca", "--cluster-cert", "--cluster-key", "--cluster-password-file"),
    ],
)
def test_a_file_that_is_a_pipe(flag: str, files: Path, tmp_path: Path) -> None:
    """Opening it would wait for somebody who writes into it, and the server would never start."""
    os.mkfifo(tmp_path / "pipe")
    paths = {"--tls-cert": files / "cert", "--tls-key": files / "key"}
    if flag.startswith("--cluster"):
        paths = {f"--cluster-{name}": files / name for name in ("cert", "key")}
        paths["--cluster-ca"] = files / "cert"
        paths["--cluster-password-file"] = files / "secret"
    paths[flag] = tmp_path / "pipe"
    given = [word for flag, path in paths.items() for word in (flag, str(path))]
    environ = {**CLUSTER, "DFLOCKD_CLUSTER_USER": "u"} if flag.startswith("--cluster") else {}

    with pytest.raises(SettingError, match=rf"{flag}.* '{tmp_path}/pipe'.*Not a regular file"):
        read_all(given, environ)


def read_all(given: list[str], environ: dict[str, str]) -> None:
    """Read what the settings name, as a server does that starts."""
    loaded = settings(*given, **environ)
    read_etcd_tls(loaded)
    read_etcd_user(loaded)


def test_a_secret_behind_links(files: Path, tmp_path: Path) -> None:
    """As Kubernetes mounts it."""
    (tmp_path / "first").symlink_to(files / "secret")
    (tmp_path / "second").symlink_to(tmp_path / "first")
    given = settings("--auth-token-file", str(tmp_path / "second"))
    assert given.server_options().secret() == b"open sesame"


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


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
    return forkserver.run(
        [sys.executable, "-m", "dflockd", *arguments],
        env={**clean, **environ},
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


# The process.


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
    arguments: list[str],
    environ: dict[str, str],
    words: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == 2
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.count("\n") == 1
    assert errors.startswith("dflockd: ")
    assert "s3cret" not in errors
    assert all(word in errors for word in words), errors


def test_a_bad_setting_ends_the_process() -> None:
    ended = run("--port", "abc")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("dflockd: ")
    assert "--port" in ended.stderr
    assert ended.stderr.count("\n") == 1


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
    [
        *("e:2379", "redis://e", "etcd:/e"),
        *(f"etcd://{text}" for text in ("", "e,,f", "u:p@e", "e f", "e:0", "e:99999", "e:x", "e:")),
        *("etcd://::1", "etcd://[::1"),
    ],
)
def test_where_the_cluster_is_must_be_an_etcd(url: str) -> None:
    with pytest.raises(SettingError, match=r"DFLOCKD_CLUSTER: .*etcd://host:2379"):
        settings(**CLUSTER | {"DFLOCKD_CLUSTER": url})


def test_a_password_in_the_place_of_an_etcd_is_not_shown() -> None:
    with pytest.raises(
        SettingError, match="set --cluster-user and --cluster-password-file"
    ) as info:
        settings(**CLUSTER | {"DFLOCKD_CLUSTER": "etcd://somebody:hunter2@e:2379"})
    assert "hunter2" not in str(info.value)


# The last two could not stand in the record of a shard.
@pytest.mark.parametrize("address", ["h:0", "unix:/s", "h:x", "a b:1", ":1", "a,b:1", "f=pinned:1"])
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
    user = read_etcd_user(settings(**CLUSTER, **name, **file))
    assert user == EtcdUser("u", str(path))
    assert user.password() == path.read_text().strip()
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
    assert read_etcd_tls(given) == EtcdTls(cert, None, None)
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
