"""The tables of options and settings in the README: each of them, with the default that it has."""

from __future__ import annotations

import re
from typing import Any

import pytest
from celery import Celery

from celery_dflock import LockedTask
from celery_dflock.config import NAMES, settings
from celery_dflock.options import OPTIONS, QUEUE_TIMEOUT, Backoff
from examples.demo.stage import ROOT

README = (ROOT / "README.md").read_text()
ROWS = {
    name: (default, meaning)
    for name, default, meaning in re.findall(
        r"^\| `(\w+)` \| (.*?) \| (.*) \|$", README, re.MULTILINE
    )
}

ELSEWHERE = {"lock_unique_ttl": "lock_unique", "lock_duplicate": "lock_unique"}
"""Options that are in the row of another."""

IN_WORDS = {
    "lock_key": "task name and all arguments",
    "lock_wait": "`dflock_wait`",
    "dflock_servers": "variable `DFLOCK_SERVERS`, else `127.0.0.1:6388`",
    "dflock_sharding_strategy": "CRC-32 of the key",
    "dflock_use_ssl": "`False`",
    "dflock_enabled": "`True`",
}
"""What cannot be compared with a value; other tests look at it."""


def cells(value: Any) -> set[str]:
    """The ways in which a table may write a value."""
    if value is None or value == "":
        return {"none", "`None`"}
    return {f'`"{value}"`' if isinstance(value, str) else f"{value:g}", f"`{value}`"}


@pytest.mark.parametrize("option", [each for each in OPTIONS if each not in ELSEWHERE])
def test_an_option(option: str) -> None:
    default, _ = ROWS[option]
    known = getattr(LockedTask, option)

    if option in IN_WORDS:
        assert default == IN_WORDS[option]
    elif option == "lock_timeout":
        assert default == f"{known:g}; {QUEUE_TIMEOUT:g} in the consumer"
    elif option == "lock_requeue":
        assert default == "`{}`" == f"`{known}`"
    else:
        assert default in cells(known)


@pytest.mark.parametrize("option", list(ELSEWHERE))
def test_an_option_beside_another(option: str) -> None:
    _, meaning = ROWS[ELSEWHERE[option]]
    known = getattr(LockedTask, option)
    value = f'`"{known}"`' if isinstance(known, str) else f"{known:g} s"

    assert f"`{option}` ({value}" in meaning


@pytest.mark.parametrize("part", list(Backoff.__dataclass_fields__))
def test_a_part_of_requeue(part: str) -> None:
    _, meaning = ROWS["lock_requeue"]
    known = getattr(Backoff(), part)

    value = "none" if part == "max_attempts" and not known else f"{known:g} s"
    assert f"`{part}` ({value})" in meaning


@pytest.mark.parametrize("setting", NAMES)
def test_a_setting(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DFLOCK_SERVERS", "DFLOCK_AUTH_TOKEN", "DFLOCK_AUTH_TOKEN_FILE"):
        monkeypatch.delenv(variable, raising=False)
    default, _ = ROWS[setting]
    known = settings(Celery("defaults", set_as_current=False))

    if setting == "dflock_auth_token":
        assert default.startswith("variable `DFLOCK_AUTH_TOKEN`")
        assert known.auth_token is None
    elif setting in IN_WORDS:
        assert default == IN_WORDS[setting]
    else:
        assert default in cells(getattr(known, setting.removeprefix("dflock_")))


def test_nothing_else_is_listed() -> None:
    listed = {name for name in ROWS if name.startswith(("lock_", "dflock_"))}

    assert listed <= {*OPTIONS, *NAMES}
