"""How good the tests of the pure rooms are: ``python -m tests.mutants [ROOM ...]``.

mutmut changes one thing in one function, and runs those tests of the room that come through it. If
none fails, the mutant has survived: it is equivalent, or a test is missing. Survivors are tried again
with all tests of the room, each in a process of its own: what was made when the code was imported, or
is remembered from run to run, can hide a mutant.

`mutmut` wants the package at the root of where it runs, and leaves alone what has a decorator. So each
room is tried in a copy, build/mutants/ROOM, in which ``@final`` stands as a comment. That changes
nothing at run time, and leaves every line where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "mutants"
MUTMUT = Path(sys.executable).parent / "mutmut"
SAMPLE = 150

SURVIVED, UNTESTED = 0, 33
"""What `mutmut` has for the exit status of the tests: they all passed, or there were none."""

CANNOT_RUN = (4, 5)
"""What pytest has, if it does not understand what to run, or finds no tests."""

NAMES = """
import sys
from pathlib import Path
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.utils.format_utils import get_mutant_name

for each in map(Path, sys.argv[1:]):
    names = mutate_file_contents(str(each), each.read_text())[1]
    print(*(get_mutant_name(each, name) for name in names), sep="\\n")
"""
"""mutmut lists its mutants only once it has run all tests."""

CONFTEST = """
from hypothesis import Phase, settings

settings.register_profile(
    "mutants",
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    max_examples=50,
    database=None,
)

def pytest_collection_modifyitems(items):
    for item in items:
        item._nodeid = item.nodeid
"""
"""That an example fails is enough: no smaller one is looked for. mutmut 3.6 looks for an attribute that
pytest 9.2 has no more."""


class Room(NamedTuple):
    """What is changed, and which tests have to notice."""

    package: str
    files: tuple[str, ...]
    """Patterns, below the package."""
    tests: tuple[str, ...]
    """Patterns, below tests/."""
    pick: str = ""
    """What pytest picks among them, as with ``-k``."""
    last: str = ""
    """What of that takes long, and is for those that survive the rest."""
    then: tuple[str, ...] = ()
    """Patterns of more, for those that survive: they take longer, with processes of their own."""


def found(patterns: tuple[str, ...], where: Path = ROOT) -> list[str]:
    """Return the files of tests that match."""
    files = {path for each in patterns for path in (where / "tests").glob(each)}
    return sorted(str(path.relative_to(where)) for path in files)


ROOMS = {
    "wire": Room("dflockd", ("wire/*",), ("dflockd/wire/test_*.py",)),
    "table": Room(
        "dflockd",
        ("table/*",),
        ("dflockd/table/test_*.py",),
        # They count what is called, and mutmut puts calls of its own in between.
        pick="not test_costs and not takes_longer and not does_not_grow",
        # They draw thousands of schedules, weigh thousands of things, or start servers.
        last=(
            "as_the_model or stands_still or _bytes or random_histories or any_part_of"
            " or round_at_most or stats_of_many or in_the_log or is_counted or many_slots_at_once"
        ),
    ),
    "session": Room(
        "dflockd",
        ("server/session.py",),
        tuple(
            f"dflockd/server/test_{n}.py" for n in ("session", "fair_session", "bytes_as_messages")
        ),
        then=tuple(
            f"dflockd/server/test_{n}.py"
            for n in ("requests", "auth", "limits", "draining", "stalls")
        ),
    ),
    "scheduler": Room(
        "dflockd",
        ("server/slices.py",),
        tuple(f"dflockd/server/test_{n}.py" for n in ("slices", "fair_session", "searches")),
        then=("dflockd/server/test_stalls.py", "stalls/test_*.py"),
    ),
    "storage": Room(
        "dflockd",
        ("storage/*",),
        tuple(
            f"dflockd/storage/test_{name}.py"
            for name in (
                "directory",
                "journal",
                "reading",
                "records",
                "syncing",
                "flips",
                "power_cuts",
                "rates",
                "refused_directory",
            )
        ),
        # Not test_power_rules.py, which changes the code by its text. The first of these goes through
        # each instruction, and mutmut puts some of its own in between.
        then=tuple(
            f"dflockd/storage/test_{n}.py"
            for n in ("interleaving", "failing_disks", "recovery", "pauses")
        ),
    ),
    "shards": Room(
        "dflockd",
        tuple(
            f"shards/{name}.py"
            for name in ("ids", "keys", "mapping", "mapper", "values", "conditions", "continuity")
        ),
        tuple(
            f"dflockd/shards/test_{name}.py"
            for name in (
                "ids",
                "mapping",
                "mapper",
                "values",
                "conditions",
                "continuity",
                "prefixes",
            )
        ),
        pick="not etcd",
    ),
    "outcome": Room(
        "celery_dflock",
        ("outcome/*",),
        tuple(
            f"celery_dflock/{name}.py"
            for name in (
                "outcome/test_header",
                "outcome/test_delivery",
                "outcome/test_requeue",
                "outcome/test_outage",
                "outcome/test_each_outcome",
                "test_bound",
            )
        ),
        # mutmut cannot name these again: their ids have brackets in them.
        pick="not nonsense",
    ),
}

PACKAGES = {"dflockd": ROOT / "server" / "dflockd", "celery_dflock": ROOT / "celery_dflock"}
ENUMERATION = re.compile(r"^(class \w+\(.*Enum\):)$", re.MULTILINE)
BESIDE = ("tests", "examples", "benchmarks")
"""What tests import."""


class Trial:
    """The copy in which the mutants of one room are tried."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.room = ROOMS[name]
        self.place = BUILD / name
        self.mutants = self.place / "mutants"
        self.log = BUILD / f"{name}.log"

    def prepare(self) -> None:
        """Make the copy."""
        shutil.rmtree(self.place, ignore_errors=True)
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "node_modules")
        for name, source in (*PACKAGES.items(), *((each, ROOT / each) for each in BESIDE)):
            shutil.copytree(source, self.place / name, ignore=ignored)
        for path in (self.place / self.room.package).glob("**/*.py"):
            text = path.read_text().replace("\n@final\n", "\n# final\n")
            # Its members are made, by its methods, before there is a mutant of these.
            path.write_text(ENUMERATION.sub(r"\1  # pragma: no mutate block", text))
        own = {
            "source_paths": [self.room.package],
            "only_mutate": [f"{self.room.package}/{each}" for each in self.room.files],
            "also_copy": [*PACKAGES, *BESIDE, "conftest.py"],
            "pytest_add_cli_args": self._pytest(),
            "pytest_add_cli_args_test_selection": self._quick_tests(),
            "track_dependencies": False,
            "use_git_change_detection": False,
        }
        lines = [f"{name} = {json.dumps(value)}" for name, value in own.items()]
        text = (ROOT / "pyproject.toml").read_text()
        (self.place / "pyproject.toml").write_text("\n".join([text, "[tool.mutmut]", *lines, ""]))
        (self.place / "conftest.py").write_text(CONFTEST)
        self.log.write_text("")

    def names(self) -> list[str]:
        """Return all mutants that there can be."""
        patterns = (f"{self.room.package}/{each}" for each in self.room.files)
        files = sorted(path for each in patterns for path in self.place.glob(each))
        command = [sys.executable, "-c", NAMES, *(path.relative_to(self.place) for path in files)]
        run = subprocess.run(command, cwd=self.place, stdout=subprocess.PIPE, text=True, check=True)
        return sorted(run.stdout.split())

    def verdicts(self) -> dict[str, int | None]:
        """What became of each mutant; ``None`` of those not tried."""
        found: dict[str, int | None] = {}
        for path in sorted(self.mutants.glob(f"{self.room.package}/**/*.meta")):
            found |= json.loads(path.read_text())["exit_code_by_key"]
        return found

    def run(self, names: list[str]) -> None:
        """Try these."""
        if self._mutmut("run", "--max-children", "1", *names).returncode:
            raise SystemExit(f"{self.name}: mutmut could not run; see {self.log}")

    def survives(self, name: str) -> bool:
        """Whether one survives all tests of the room, in processes of their own: the quick ones first.

        It is written into the code, where nothing else is changed: among all others, each call of a
        function goes by way of mutmut, and what draws many schedules takes minutes.
        """
        room = self.room
        slow = " and ".join(filter(None, [room.pick, room.last and f"({room.last})"]))
        with self._applied(name):
            return (
                self._passes(self._quick_tests())
                and (not room.last or self._passes(self._tests(slow)))
                and (not room.then or self._passes(self._tests(room.pick, room.then)))
            )

    def difference(self, name: str) -> str:
        """Return what is changed."""
        lines = self._mutmut("show", name).stdout.splitlines()
        return "\n".join(line for line in lines if line[:1] in ("-", "+") and line[:3] != "---")

    def _pytest(self) -> list[str]:
        # To show where a test failed, pytest would parse a file that has all mutants in it.
        shown = ["-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no"]
        # mutmut has a limit of its own, of CPU.
        return [*shown, "--timeout", "900", "--hypothesis-profile", "mutants"]

    @contextlib.contextmanager
    def _applied(self, name: str) -> Iterator[None]:
        """Have one mutant in the code, and no other."""
        module = self.place.joinpath(*name.partition(".x")[0].split("."))
        path = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        text = path.read_text()
        try:
            if self._mutmut("apply", name).returncode or path.read_text() == text:
                raise SystemExit(f"{self.name}: mutmut could not apply {name}; see {self.log}")
            yield
        finally:
            path.write_text(text)

    def _passes(self, tests: list[str]) -> bool:
        # Python would take one version, compiled, for another of the same second and length.
        environment = {"PYTHONPATH": str(self.place), "PYTHONDONTWRITEBYTECODE": "1"}
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", *self._pytest(), *tests],
            cwd=self.place,
            env={**os.environ, **environment},
            capture_output=True,
            check=False,
        )
        if run.returncode in CANNOT_RUN:
            raise SystemExit(f"{self.name}: pytest could not run {' '.join(tests)}")
        return run.returncode == 0

    def _tests(self, pick: str, files: tuple[str, ...] = ()) -> list[str]:
        # Of the copy: where it was made from, others may work on.
        return [*found(files or self.room.tests, self.place), *(("-k", pick) if pick else ())]

    def _quick_tests(self) -> list[str]:
        room = self.room
        return self._tests(
            " and ".join(filter(None, [room.pick, room.last and f"not ({room.last})"]))
        )

    def _mutmut(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [MUTMUT, *arguments], cwd=self.place, capture_output=True, text=True, check=False
        )
        with self.log.open("a") as log:
            log.write(f"$ mutmut {' '.join(arguments)}\n{done.stdout}{done.stderr}\n")
        return done


def try_room(name: str, options: argparse.Namespace) -> Iterator[str]:
    """Try mutants of a room; the lines say what survived, and how many."""
    trial = Trial(name)
    trial.prepare()
    all_names = trial.names()
    names = [each for each in all_names if fnmatch.fnmatch(each, options.only)]
    if options.sample and len(names) > options.sample:
        names = sorted(random.Random(options.seed).sample(names, options.sample))
    trial.run(names)
    verdicts = trial.verdicts()
    doubted = [each for each in names if verdicts[each] in (SURVIVED, UNTESTED)]
    survived = 0
    for each in doubted:
        if trial.survives(each):
            survived += 1
            why = "no test comes there" if verdicts[each] == UNTESTED else "survived"
            yield f"\n{each}: {why}\n{trial.difference(each)}"
    killed = len(names) - survived
    yield (
        f"\n{name}: {len(names)} of {len(all_names)} mutants tried, "
        f"{killed} killed ({killed / len(names):.1%}), {survived} survived"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(ROOMS)}")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="of each room; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="says which; default 0")
    parser.add_argument("--only", default="*", help="those whose names match, of each room")
    options = parser.parse_args()
    unknown = set(options.rooms) - set(ROOMS)
    if unknown:
        parser.error(f"there is no room {', '.join(sorted(unknown))}: {', '.join(ROOMS)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in options.rooms or ROOMS:
        for line in try_room(name, options):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
