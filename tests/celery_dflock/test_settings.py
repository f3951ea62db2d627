"""Bad settings are refused when they are first used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_dflock import LockedTask
from celery_dflock.config import SSL_FILES, settings

# Settings.


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("dflock_servers", "one:x", "server 'one:x' is malformed: write"),
        ("dflock_servers", "one:6388,", "server '' is malformed: write"),
        ("dflock_servers", ["one:70000"], "is malformed: write"),
        # Not localhost, as if nobody had said anything.
        ("dflock_servers", [], "give a list"),
        ("dflock_servers", "", "server '' is malformed: write"),
        ("dflock_servers", [5], "server 5 is malformed: write"),
        ("dflock_servers", 5, "5"),
        ("dflock_servers", ["one", "one:6388"], "names one server twice"),
        ("dflock_unavailable", "skip", "'skip': give one of requeue, fail, run"),
        ("dflock_enabled", "no", "'no': give True or False"),
        ("dflock_wait", "queue", "'queue': give one of slot, consumer"),
        ("dflock_consumer_timeout", -1, "-1: give seconds, or 0 for no limit"),
        ("dflock_consumer_timeout", "1h", "'1h': give seconds, or 0 for no limit"),
        ("dflock_max_waiting", -1, "-1: give a whole number, 0 or more"),
        ("dflock_max_waiting", True, "True: give a whole number, 0 or more"),
        ("dflock_key_prefix", "my app:", "'my app:': give text without white space"),
        ("dflock_key_prefix", "a\nb", "give text without white space"),
        ("dflock_key_prefix", 5, "5: give text"),
        ("dflock_sharding_strategy", "no.such:function", "'no.such:function'"),
        ("dflock_sharding_strategy", 5, "5: give a function (key, number of servers) -> index"),
        ("dflock_auth_token", "two\nlines", "one line"),
        ("dflock_auth_token", 72, "one line"),
    ],
)
def test_bad_setting(setting: str, value: object, text: str) -> None:
    own = Celery("bad", set_as_current=False)
    own.conf[setting] = value
    ran = []

    @own.task(base=LockedTask, shared=False)
    def task() -> None:
        ran.append(1)

    with pytest.raises(ImproperlyConfigured) as refused:
        task.apply(throw=True)
    message = str(refused.value)
    assert message.startswith(setting)
    assert text in message
    assert "\n" not in message
    assert not ran
    if setting == "dflock_auth_token":
        assert str(value) not in message


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "token"
    monkeypatch.delenv("DFLOCK_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("DFLOCK_AUTH_TOKEN_FILE", str(path))
    return path


@pytest.mark.parametrize("text", ["open sesame", "open sesame\n", "open sesame\r\n"])
def test_the_token_comes_from_a_file(text: str, token_file: Path) -> None:
    token_file.write_bytes(text.encode())
    app = Celery("file", set_as_current=False)

    assert settings(app).auth_token == "open sesame"

    app.conf.dflock_auth_token = "of the app"
    assert settings(app).auth_token == "of the app"


def test_the_name_of_the_token_file_is_looked_at_again(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file.write_text("first")
    token_file.with_name("second").write_text("second")
    app = Celery("file", set_as_current=False)
    assert settings(app).auth_token == "first"

    monkeypatch.setenv("DFLOCK_AUTH_TOKEN_FILE", str(token_file.with_name("second")))

    assert settings(app).auth_token == "second"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "must hold one line that is not empty"),
        (b"\n", "must hold one line that is not empty"),
        (b"open\nsesame\n", "must hold one line that is not empty"),
        (b"open\0sesame", "must hold one line that is not empty"),
        (b"sesame\xff", "is not UTF-8 text"),
    ],
)
def test_a_bad_token_file(content: bytes | None, text: str, token_file: Path) -> None:
    if content is not None:
        token_file.write_bytes(content)

    with pytest.raises(ImproperlyConfigured) as refused:
        settings(Celery("file", set_as_current=False))

    assert str(refused.value) == f"DFLOCK_AUTH_TOKEN_FILE: {str(token_file)!r} {text}"


def test_a_token_file_that_is_a_pipe(token_file: Path) -> None:
    """Reading it would wait for somebody who writes into it."""
    os.mkfifo(token_file)

    with pytest.raises(ImproperlyConfigured) as refused:
        settings(Celery("file", set_as_current=False))

    assert str(refused.value) == (
        f"DFLOCK_AUTH_TOKEN_FILE: {str(token_file)!r} cannot be read: Not a regular file"
    )


@pytest.mark.parametrize("name", SSL_FILES)
def test_a_certificate_that_is_a_pipe(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    app = Celery("ssl", set_as_current=False)
    app.conf.dflock_use_ssl = {"certfile": __file__, name: str(tmp_path / "pipe")}

    with pytest.raises(ImproperlyConfigured, match=r"^dflock_use_ssl .*Not a regular file"):
        settings(app)


def test_the_token_is_said_once(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token_file.write_text("open sesame")
    monkeypatch.setenv("DFLOCK_AUTH_TOKEN", "open sesame")

    with pytest.raises(ImproperlyConfigured) as refused:
        settings(Celery("file", set_as_current=False))

    assert str(refused.value) == (
        "DFLOCK_AUTH_TOKEN and DFLOCK_AUTH_TOKEN_FILE are both set: set one of them"
    )


def test_settings_do_not_show_the_token() -> None:
    own = Celery("secret", set_as_current=False)
    own.conf.dflock_auth_token = "very-secret"
    assert settings(own).auth_token == "very-secret"
    assert "very-secret" not in repr(settings(own))
