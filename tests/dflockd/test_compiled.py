"""What is compiled, and that it says so itself."""

from __future__ import annotations

import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import FunctionType

import pytest

import dflockd
from dflockd.server.session import Session
from dflockd.table import LockTable
from dflockd.wire import encode_reply

ROOT = Path(__file__).parents[2]


def test_it_says_what_runs() -> None:
    functions = [LockTable.handle, Session.data_received, encode_reply]
    assert {isinstance(each, FunctionType) for each in functions} == {not dflockd.compiled}


def test_it_is_not_said_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    import dflockd.table.slots

    monkeypatch.setattr(dflockd.table.slots, "__file__", "slots.py")
    assert dflockd.compiled is False


@pytest.mark.skipif(not dflockd.compiled, reason="nothing is compiled here")
def test_all_is_compiled_that_is_meant_to_be() -> None:
    hook = tomllib.loads((ROOT / "server/pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]["hooks"]["mypyc"]
    sources, installed = ROOT / "server", Path(dflockd.__file__).parents[1]
    meant = {
        path.relative_to(sources).with_suffix("")
        for pattern in hook["include"]
        for path in sources.glob(pattern.lstrip("/"))
    }
    meant -= {Path(each.lstrip("/")).with_suffix("") for each in hook["exclude"]}
    meant = {path for path in meant if path.name != "__init__"}
    suffix = EXTENSION_SUFFIXES[0]
    found = {
        path.relative_to(installed).with_name(path.name.removesuffix(suffix))
        for path in (installed / "dflockd").rglob(f"*{suffix}")
    }
    assert found == meant
