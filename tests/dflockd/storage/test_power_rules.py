"""The rules that keep locks over power cuts and kills, each taken out: a state of `power` shows it."""

from __future__ import annotations

import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import dflockd
from dflockd.storage import reading
from dflockd.storage.directory import StateDir, StateError
from dflockd.storage.disk import Disk
from dflockd.storage.journal import Journal
from tests.dflockd.storage.test_power_cuts import (
    Tally,
    cut_everywhere,
    kill_everywhere,
    lived,
    patch,
)

__all__ = ["patch"]


class Rule(NamedTuple):
    """A rule, as a piece of the text of the code that keeps it."""

    where: Any
    name: str
    text: str
    instead: str = "pass"
    shown_by: str = "kill"
    """What shows it: a kill, or only the end of the machine."""
    seed: int = 1
    """Of a life in which that is soon."""


RULES = {
    "what is open is synced": Rule(
        Journal,
        "sync",
        "    self._disk.sync(current.file)\n    if number",
        "    if number",
        shown_by="cut",
    ),
    "what was left for the next one is synced": Rule(
        Journal, "sync", "self._disk.sync(each.file)", shown_by="cut", seed=7
    ),
    "the names of new segments are synced": Rule(
        Journal, "sync", "self._disk.sync_names()", shown_by="cut"
    ),
    "what was moved is synced before its old place is deleted": Rule(
        Journal,
        "sync",
        "    self._is_synced = True\n",
        """
    self._is_synced = True
    for number in range(self._first, self._oldest):
        self._disk.unlink([name_of(self._generation, number)])
""",
        seed=20,
    ),
    "which is the first is on the disk before the others are deleted": Rule(
        Journal,
        "sync",
        "        self._disk.sync(current.file)\n        numbers",
        "        numbers",
        shown_by="cut",
        seed=20,
    ),
    "a segment is marked as synced after the sync": Rule(
        Journal,
        "sync",
        "    for each in turned:\n        self._disk.sync",
        "    self._mark(current, SYNCED, end)\n    for each in turned:\n        self._disk.sync",
        shown_by="cut",
    ),
    "the start is synced": Rule(
        Journal, "start", "    self.sync()\n    self.sync()", "    pass", shown_by="cut"
    ),
    "a step counts once all of it is there": Rule(
        Journal,
        "_append",
        "    self._data[",
        "    self._words[END] = word(end)\n    self._data[",
    ),
    "the old journal is deleted once the new one counts": Rule(
        StateDir,
        "start",
        "        # Until here",
        "        self.journal.drop_others()\n        # Until here",
    ),
    "the new journal counts once it is there": Rule(
        StateDir,
        "start",
        "        self.journal.start(",
        "        self._save(generation=generation, boot=_boot_id(), clean=False)\n"
        "        self.journal.start(",
    ),
    "a longer lease is on the disk before it is granted": Rule(
        Journal, "record", "hold.span > self.longest", "False"
    ),
    "the state file is synced before it gets its name": Rule(
        Disk, "replace", "self.sync(file)", shown_by="cut"
    ),
    "the name of the state file is synced": Rule(
        Disk, "replace", "self.sync_names()", shown_by="cut"
    ),
    "a clean stop is synced": Rule(Journal, "close", "self.sync()", shown_by="cut"),
    "after a power cut holders are waited for": Rule(
        StateDir, "_read", 'float(state["longest_lease"])', "0.0", shown_by="cut"
    ),
    "a power cut is no kill": Rule(StateDir, "_read", "else Trust.CUT", "else Trust.KEPT"),
    "a recovery is as long as the longest lease": Rule(
        StateDir, "_read", 'float(state["longest_lease"])', "20.0", shown_by="cut"
    ),
    "what is older than the first does not count": Rule(
        reading, "read", "if number >= first", "if True", shown_by="cut", seed=20
    ),
    "a segment may be just begun when its process is killed": Rule(
        reading._Check, "kept", "last -= 1"
    ),
    "what was not synced may be missing": Rule(
        reading, "read", "check.cut()", "return _result(check.kept())", shown_by="cut"
    ),
}


def plant(rule: Rule, patch: pytest.MonkeyPatch) -> None:
    """Take a rule out of the code."""
    source = textwrap.dedent(inspect.getsource(getattr(rule.where, rule.name)))
    assert source.count(rule.text) == 1, source
    module = rule.where if inspect.ismodule(rule.where) else sys.modules[rule.where.__module__]
    scope = dict(vars(module))
    exec(source.replace(rule.text, rule.instead), scope)
    patch.setattr(rule.where, rule.name, scope[rule.name])


def found(path: Path, seed: int, shown_by: str, patch: pytest.MonkeyPatch) -> str | None:
    """Return the first thing that is wrong, if anything is."""
    life = lived(path / "run", seed, patch)

    tally: Tally
    if shown_by == "kill":
        tally = kill_everywhere(path / "left", life, enough=1)
    else:
        tally = cut_everywhere(path / "left", life, seed, states=12, every=2, enough=1)
    return next(iter(tally.wrong), None)


def can_be_broken(rule: Rule) -> bool:
    """Whether that rule can be taken out: not of what is compiled."""
    return not dflockd.compiled or rule.where is not Journal


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if can_be_broken(rule)])
def test_without_the_rule_a_state_shows_it(
    tmp_path: Path, rule: str, patch: pytest.MonkeyPatch
) -> None:
    plant(RULES[rule], patch)
    first = RULES[rule].seed
    for seed in range(first, first + 5):
        try:
            (path := tmp_path / str(seed)).mkdir()
            wrong = found(path, seed, RULES[rule].shown_by, patch)
        except (StateError, AssertionError) as exc:
            wrong = f"the run itself fails: {exc}"
        if wrong is not None:
            print(wrong)
            return
    pytest.fail(f"nothing is wrong without it: {rule}")
