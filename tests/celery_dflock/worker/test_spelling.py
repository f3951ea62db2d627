"""Settings that look like ours and have no effect: a worker says so when it starts."""

from __future__ import annotations

import json
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_dflock.cli import dflock
from celery_dflock.config import NAMES
from celery_dflock.worker import banner
from celery_dflock.worker.spelling import KNOWN, ignored
from examples.demo.stage import ROOT

DOCUMENTED = re.compile(r"^\| `(dflock_\w+)` \|", re.MULTILINE)


def configured(namespace: str | None = None, **given: Any) -> Celery:
    app = Celery("spelling", set_as_current=False)
    source = SimpleNamespace(**given) if namespace else given
    app.config_from_object(source, namespace=namespace)
    return app


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dflock_servers": ["a:1"], "dflock_max_waiting": 3, "broker_url": "memory://"}, None),
        (
            {"dflock_server": ["a:1"]},
            "dflock_server is not a setting: did you mean dflock_servers?",
        ),
        (
            {"dflock_beat_schedule": "x"},
            "dflock_beat_schedule is not a setting: did you mean dflock_beat_scheduler?",
        ),
        ({"dflock_colour": "red"}, "dflock_colour is not a setting"),
    ],
)
def test_of_an_app(given: dict[str, Any], text: str | None) -> None:
    assert ignored(configured(**given)) == ([text] if text else [])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"CELERY_DFLOCK_SERVERS": ["a:1"], "MY_DFLOCK_SERVERS": 1}, None),
        (
            {"CELERY_DFLOCK_SERVER": ["a:1"]},
            "CELERY_DFLOCK_SERVER is not a setting: did you mean CELERY_DFLOCK_SERVERS?",
        ),
        (
            {"DFLOCK_SERVERS": ["a:1"]},
            "the setting DFLOCK_SERVERS is ignored: write CELERY_DFLOCK_SERVERS",
        ),
        (
            {"CELERY_DFLOCK_BEAT_TTL": 1},
            "CELERY_DFLOCK_BEAT_TTL is not a setting: did you mean CELERY_DFLOCK_BEAT_LOCK_TTL?",
        ),
    ],
)
def test_under_a_namespace(given: dict[str, Any], text: str | None) -> None:
    """As with Django."""
    assert ignored(configured("CELERY", **given)) == ([text] if text else [])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"CELERY_DFLOCK_SERVERS": ["a:1"], "dflock_servers": ["a:1"], "MY_DFLOCK_WAIT": 1}, None),
        (
            {"CELERY_DFLOCK_SERVERS": ["a:1"]},
            "the setting CELERY_DFLOCK_SERVERS is ignored: write dflock_servers, or give "
            "config_from_object namespace='CELERY'",
        ),
        (
            {"CELERY_DFLOCK_SERVER": ["a:1"]},
            "CELERY_DFLOCK_SERVER is not a setting: did you mean dflock_servers?",
        ),
    ],
)
def test_without_the_namespace_that_they_are_written_for(
    given: dict[str, Any], text: str | None
) -> None:
    """The worker would ask the lock server on its own host."""
    assert ignored(configured(**given)) == ([text] if text else [])
    app = Celery("spelling", set_as_current=False)
    app.config_from_object(SimpleNamespace(**given))
    assert ignored(app) == ([text] if text else [])


def test_under_another_namespace() -> None:
    assert ignored(configured("SHOP", CELERY_DFLOCK_SERVERS=["a:1"])) == [
        "the setting CELERY_DFLOCK_SERVERS is ignored: write SHOP_DFLOCK_SERVERS"
    ]


def test_set_later() -> None:
    app = Celery("spelling", set_as_current=False)
    app.conf.dflock_unavailabel = "run"

    assert ignored(app) == ["dflock_unavailabel is not a setting: did you mean dflock_unavailable?"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DFLOCK_AUTH_TOKEN_FILE", None),
        ("DFLOCK_SERVICE_HOST", None),
        ("DFLOCKD_SERVER", None),  # the lock server says that
        ("DFLOCK_SERVER", "the variable DFLOCK_SERVER is ignored: did you mean DFLOCK_SERVERS?"),
        (
            "DFLOCK_KEY_PREFIX",
            "the variable DFLOCK_KEY_PREFIX is ignored: set dflock_key_prefix in the app",
        ),
        ("DFLOCK_COLOUR", "the variable DFLOCK_COLOUR is ignored"),
        (
            "CELERY_DFLOCK_SERVERS",
            "the variable CELERY_DFLOCK_SERVERS is ignored: did you mean DFLOCK_SERVERS?",
        ),
        (
            "CELERY_DFLOCK_WAIT",
            "the variable CELERY_DFLOCK_WAIT is ignored: set dflock_wait in the app",
        ),
        ("CELERY_DFLOCK_SERVICE_HOST", None),
        ("CELERY_DFLOCK_COLOUR", None),
    ],
)
def test_a_variable(name: str, text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "value")

    assert ignored(configured()) == ([text] if text else [])


def test_a_variable_that_the_app_reads_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many settings of Django are made of variables of the same name."""
    monkeypatch.setenv("CELERY_DFLOCK_SERVERS", "a:1")

    assert ignored(configured("CELERY", CELERY_DFLOCK_SERVERS=["a:1"])) == []


def test_the_status_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLOCK_SERVER", "a:1")
    app = configured(dflock_servers=["127.0.0.1:1"])  # where nobody listens

    context = CLIContext(app=app, no_color=True, workdir=None)
    done = CliRunner().invoke(dflock, ["status", "--json"], obj=context)

    assert "Warning: the variable DFLOCK_SERVER is ignored" in done.stderr
    assert json.loads(done.stdout)


def test_a_worker_says_it(caplog: pytest.LogCaptureFixture) -> None:
    worker = SimpleNamespace(app=configured(dflock_enabled=False, dflock_ttl=3), extra_info=None)

    with caplog.at_level(logging.WARNING, "celery_dflock"):
        banner.add_servers(worker)

    assert "dflock_ttl is not a setting" in caplog.text


def test_what_is_documented_is_known() -> None:
    pages = [ROOT / "README.md", ROOT / "docs" / "beat.md"]
    documented = {name for page in pages for name in DOCUMENTED.findall(page.read_text())}

    assert documented <= set(KNOWN)
    assert len(documented) >= len(NAMES)


def test_options_without_the_base_are_named() -> None:
    app = configured(broker_url="memory://")

    @app.task(name="forgotten", shared=False, lock_key="{key}", lock_timeout=0)
    def forgotten(key: str) -> None: ...

    assert ignored(app) == [
        "task forgotten takes no lock: lock_key, lock_timeout without the base LockedTask: "
        "write @app.task(base=LockedTask, lock_key=...)"
    ]


def test_options_on_a_task_without_the_base_are_named() -> None:
    app = configured(broker_url="memory://")

    @app.task(name="forgotten", shared=False)
    def forgotten() -> None: ...

    forgotten.lock_timeout = 0

    assert ignored(app) == [
        "task forgotten takes no lock: lock_timeout without the base LockedTask: "
        "write @app.task(base=LockedTask, lock_timeout=...)"
    ]
