"""Build both distributions, and use the wheels as a stranger would: `make release-check`.

Each wheel is built from its own sdist. What is built is looked at with twine, check-wheel-contents and
pyroma. Then an empty environment gets the wheels by the command of the README, runs the quick start
word for word, and each Python snippet of the README. With ``--broker URL`` the quick start uses that
broker instead of a Redis of its own.

With ``--tag v1.2.3`` it only says whether both have that version, and the changelog a section for it.

Links lead to the repository that ``GITHUB_REPOSITORY`` names (`docs/published.py`). What is published,
with ``--tag`` or ``--out``, is refused without it; elsewhere an invented name does.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import published  # noqa: E402

from examples.demo import stage  # noqa: E402
from tests import quick_start  # noqa: E402

REHEARSAL = "nobody/celery-dflock"
NO_SOURCES = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis"
)
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
PROJECTS = {"celery-dflock": ROOT, "dflockd-py": ROOT / "server"}
MODULES = {"celery-dflock": "celery_dflock", "dflockd-py": "server/dflockd"}
BEST_RATING = "10/10"


def version() -> str:
    """The version, which both have."""
    found = {VERSION.search((ROOT / m / "__init__.py").read_text())[1] for m in MODULES.values()}
    if len(found) != 1:
        raise SystemExit(f"the two distributions have different versions: {sorted(found)}")
    return found.pop()


def check_tag(tag: str) -> None:
    if tag != f"v{version()}":
        raise SystemExit(f"the tag is {tag} and the version is {version()}: correct one of them")
    if not re.search(
        rf"^## {re.escape(version())} - \d", (ROOT / "CHANGELOG.md").read_text(), re.M
    ):
        raise SystemExit(f"CHANGELOG.md has no section '## {version()} - <date>': date it")


def tool(*command: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


def build(dist: Path, of: str) -> None:
    """Build both from a copy of the sources, in which links lead to this repository."""
    with tempfile.TemporaryDirectory(prefix="sources-") as directory:
        sources = Path(directory) / "sources"
        shutil.copytree(ROOT, sources, symlinks=True, ignore=NO_SOURCES)
        published.write(sources, of)
        for project in PROJECTS.values():
            tool("build", "--outdir", dist, sources / project.relative_to(ROOT))
    say("built", ", ".join(sorted(path.name for path in dist.iterdir())))


def look_at(dist: Path) -> None:
    files = sorted(dist.iterdir())
    tool("twine", "check", "--strict", *files)
    tool("check_wheel_contents", *dist.glob("*.whl"))
    for path in dist.glob("*.tar.gz"):
        # The authors have a place for reports (SECURITY.md), and no address.
        rating = tool("pyroma", "--skip-tests", "AuthorEmail", "--file", path)
        if f"Final rating: {BEST_RATING}" not in rating:
            raise SystemExit(f"pyroma is not content with {path.name}:\n{rating}")
    for path in dist.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
            shown = wheel.read(name).decode()
        if wrong := published.unfit(shown):
            raise SystemExit(f"an index would show this of {path.name}: {', '.join(wrong)}")
    say("looked at", f"twine --strict, check-wheel-contents, pyroma {BEST_RATING}")


def install(dist: Path, place: Path) -> Path:
    """Make an environment by the README's own command; return where its programs are."""
    steps = quick_start.QuickStart(quick_start.README.read_text())
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    programs = place / ("Scripts" if sys.platform == "win32" else "bin")
    started = time.monotonic()
    words = shlex.split(steps.install)
    subprocess.run(
        [str(programs / words[0]), *words[1:], "--quiet", "--find-links", str(dist), "--pre"],
        env=quick_start.environment(programs),
        check=True,
    )
    say("installed", f"{steps.install.strip()}, {time.monotonic() - started:.0f} s")
    for name in PROJECTS:  # not some other one that an index has
        shown = subprocess.run(
            [str(programs / "pip"), "show", name], capture_output=True, text=True, check=True
        )
        if f"Version: {version()}\n" not in shown.stdout:
            raise SystemExit(f"{name} {version()} was not installed:\n{shown.stdout}")
    return programs


def use(programs: Path, place: Path, broker: str | None) -> None:
    place.mkdir()
    started = time.monotonic()
    if broker is None:
        with stage.Redis(place) as redis:
            started = time.monotonic()
            output = quick_start.run(place, programs, redis.url, redis.url)
    else:
        backend = broker if broker.startswith("redis") else "rpc://"
        output = quick_start.run(place, programs, broker, backend)
    steps = quick_start.QuickStart(quick_start.README.read_text())
    if quick_start.without_times(output) != quick_start.without_times(steps.output):
        raise SystemExit(f"the quick start printed something else:\n{output}")
    say("quick start", f"as printed, {time.monotonic() - started:.0f} s with 4 s of work")


def run_snippets(programs: Path, place: Path) -> None:
    snippets = re.findall(
        r"^```python\n(.*?)^```", quick_start.README.read_text(), re.DOTALL | re.MULTILINE
    )
    snippets = [text for text in snippets if "__main__" not in text]
    server = stage.LockServer(place)
    server.python = str(programs / "python")
    with server:
        env = {**quick_start.environment(programs), "DFLOCK_SERVERS": server.address}
        where = f"acquire_timeout_s=10, servers=[({server.host!r}, {server.port})])"
        for text in snippets:
            script = place / "snippet.py"
            script.write_text(text.replace("acquire_timeout_s=10)", where))
            subprocess.run(
                [str(programs / "python"), "-W", "error", str(script)],
                cwd=place,
                env=env,
                check=True,
                stdout=subprocess.DEVNULL,
            )
    say("snippets", f"{len(snippets)} of the README ran")


def say(what: str, how: str) -> None:
    print(f"{what:12} {how}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", help="only check that this is the tag of the version")
    parser.add_argument("--broker", help="URL of a broker for the quick start")
    parser.add_argument("--out", type=Path, help="keep what was built there")
    arguments = parser.parse_args()
    of = published.repository()
    if of is None:
        if arguments.tag or arguments.out:
            raise SystemExit(f"{published.SETTING} is not set: whose repository do links lead to?")
        of = REHEARSAL
    if arguments.tag:
        check_tag(arguments.tag)
        return
    with tempfile.TemporaryDirectory(prefix="release-") as directory:
        place = Path(directory)
        build(place / "dist", of)
        look_at(place / "dist")
        programs = install(place / "dist", place / "env")
        use(programs, place / "quick", arguments.broker)
        run_snippets(programs, place / "quick")
        if arguments.out:
            shutil.copytree(place / "dist", arguments.out, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
