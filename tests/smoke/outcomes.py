"""What becomes of locks when containers are killed, restarted, paused or cut off.

``python -m tests.smoke.outcomes`` starts docker-compose.yml with two workers, does all that to each
service while tasks run, has the record of it judged by the checker of the chaos runs, measures the
image, and writes the tables of the pages about containers; with ``--cluster`` the same is done to
examples/cluster. It takes ten minutes, needs a Docker engine on Linux (the containers' clock is
compared with this process's), and ends with status 1 if two have held one lock.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.checker import check, undelivered
from tests.chaos.history import Event, Recorder, now, read
from tests.chaos.options import HISTORY
from tests.chaos.story import Finding, Section, Story
from tests.smoke import engine, figures
from tests.smoke.engine import ROOT, docker
from tests.smoke.names import TICK, group

PAGES = (ROOT / "docs" / "containers.md", ROOT / "docs" / "explanation" / "containers.md")
PROJECT = "dflock-outcomes"
AWAY = 8.0
"""Seconds of a pause and of a cut: longer than a lease, or than what a server of a cluster promises."""
DOWN = 2.0
"""Seconds until a killed container is started again."""
CALM = 5.0
"""Seconds between two faults, once all is as it was."""
QUIET = 120.0
"""Seconds that tasks may take to end once a fault is over: what was lost with a worker comes back
after the visibility timeout."""
HELD = 800_000_000
"""Nanoseconds after which a section is one of the long ones, with seconds to go."""
TOGETHER = ("overlap", "stale write accepted")

ACTIONS = ("kill -s KILL, then start", "restart", "pause, unpause", "network disconnect, connect")


@dataclass(frozen=True)
class Topology:
    """What is started, and what is done to it.

    Attributes:
        files: of compose, the last of them laid over the others.
        lease: of the locks, in seconds.
        services: that are killed and so on.
        servers: the lock servers; any of them tells who leads the beats, one of them does.
    """

    name: str
    files: Sequence[str]
    lease: int
    services: Sequence[str]
    servers: Sequence[str]


ALONE = Topology(
    name="outcomes",
    files=("docker-compose.yml", "tests/smoke/outcomes.yml"),
    lease=5,
    services=("dflockd", "worker", "beat", "redis"),
    servers=("dflockd",),
)
CLUSTER = Topology(
    name="cluster-outcomes",
    files=("examples/cluster/docker-compose.yml", "tests/smoke/cluster-outcomes.yml"),
    lease=14,
    services=("dflockd-1", "etcd"),
    servers=("dflockd-1", "dflockd-2", "dflockd-3"),
)


@dataclass(frozen=True)
class Trial:
    """One thing that was done to one container, from `began` until the next, in nanoseconds."""

    service: str
    action: str
    began: int
    ended: int


class Project:
    """The compose project of a run."""

    def __init__(self, topology: Topology, directory: Path) -> None:
        self.topology = topology
        self.directory = directory
        os.environ["OUTCOMES_DIRECTORY"] = str(directory)
        os.environ["OUTCOMES_LEASE"] = str(topology.lease)

    def compose(self, *words: str) -> str:
        files = [word for name in self.topology.files for word in ("-f", name)]
        return engine.compose("-p", PROJECT, *files, *words)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).split()

    def leader(self) -> str:
        """The container of the beat that sends."""
        ask = (
            "import json, pathlib; from dflockd import admin;"
            "token = pathlib.Path('/run/secrets/dflockd-token').read_text().rstrip();"
            "print(json.dumps(admin.stats('127.0.0.1:6388', token)['locks']))"
        )
        host = next(
            lock["label"].split()[1]
            for server in self.topology.servers
            for lock in json.loads(self.compose("exec", "-T", server, "python3", "-c", ask))
            if lock["key"].startswith("celery-beat:")
        )
        return next(c for c in self.containers("beat") if c.startswith(host))


class Run:
    """All trials, one after the other."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._path = project.directory / HISTORY
        self._recorder = Recorder(self._path)
        self._path.chmod(0o666)  # the containers have users of their own

    def trials(self, services: Sequence[str]) -> Iterator[Trial]:
        """Do everything to each service."""
        self.wait_until_calm(now())
        for service in services:
            for action in ACTIONS:
                container = self._victim(service, self._wait_for_a_holder())
                began = now()
                self._recorder.note("fault", detail=f"{service}: {action}")
                self._broken()
                getattr(self, "_" + action.split(" ")[0].rstrip(","))(service, container)
                self._broken()
                self.wait_until_calm(now())
                yield Trial(service, action, began, now())

    def _wait_for_a_holder(self) -> int:
        """Return the group of one who has held a lock for a while, and will for another."""
        ends = time.monotonic() + QUIET
        while time.monotonic() < ends:
            for attempt in Story(read(self._path)).attempts.values():
                begin = attempt.get("begin")
                if begin is None or attempt.keys() & {"end", "lost"} or begin.key == TICK:
                    continue
                if HELD < now() - begin.at < 2 * HELD:
                    return begin.group
            time.sleep(0.2)
        raise RuntimeError(f"no task has held a lock for {HELD / 1e9:g} s")

    def _victim(self, service: str, holder: int) -> str:
        if service == "beat":
            return self._project.leader()
        containers = self._project.containers(service)
        return next((c for c in containers if group(c) == holder), containers[0])

    def _broken(self) -> None:
        # Places in queues that were had before or meanwhile count no more.
        self._recorder.note("broken")

    def _kill(self, service: str, container: str) -> None:
        with self._death(service, container):
            docker("kill", "-s", "KILL", container)
        time.sleep(DOWN)
        docker("start", container)

    def _restart(self, service: str, container: str) -> None:
        if service == "worker":
            self._recorder.note("stopping", group=group(container))
        docker("restart", container)

    def _pause(self, service: str, container: str) -> None:
        docker("pause", container)
        time.sleep(AWAY)
        docker("unpause", container)

    def _network(self, service: str, container: str) -> None:
        network = f"{PROJECT}_default"
        docker("network", "disconnect", network, container)
        time.sleep(AWAY)
        docker("network", "connect", "--alias", service, network, container)

    @contextlib.contextmanager
    def _death(self, service: str, container: str) -> Iterator[None]:
        # Before, because nothing of it is certain any more; and after, for what it did meanwhile.
        is_worker = service == "worker"
        if is_worker:
            self._recorder.note("died", group=group(container))
        yield
        if is_worker:
            self._recorder.note("died", group=group(container))

    def wait_until_calm(self, since: int) -> None:
        """Until what was sent before `since` has ended, and a task of each origin was granted after."""
        origins = {True, False}
        self._wait(
            lambda events: (
                not self._open(events, since)
                and {e.key == TICK for e in events if e.what == "granted" and e.at > since}
                == origins
            )
        )

    def settle(self) -> None:
        """Until everything that was sent has ended."""
        self._project.compose("stop", "publisher")
        self._wait(lambda events: not self._open(events, now()))

    def _wait(self, is_over: Callable[[list[Event]], bool]) -> None:
        ends = time.monotonic() + QUIET
        time.sleep(CALM)
        while time.monotonic() < ends:
            if is_over(read(self._path)):
                return
            time.sleep(1)
        print(f"  not all tasks have ended after {QUIET:g} s", flush=True)

    def _open(self, events: list[Event], until: int) -> set[str]:
        sent = {event.task for event in events if event.what == "sent" and event.at < until}
        done = {event.task for event in events if event.what == "done"}
        return sent - done - undelivered(events)


@contextlib.contextmanager
def running(topology: Topology, directory: Path) -> Iterator[Project]:
    project = Project(topology, directory)
    try:
        project.compose("up", "-d", "--scale", "worker=2", "--scale", "beat=2")
        yield project
    finally:
        if sys.exc_info()[0] is not None:
            (directory / "containers.log").write_text(project.compose("logs", "--no-color"))
        project.compose("down", "--volumes", "--timeout", "5")


def row(trial: Trial, story: Story, findings: Sequence[Finding]) -> list[str]:
    """What is known of a trial, for people."""
    mine = [found for found in findings if trial.began <= found.at < trial.ended]
    held = [s for s in story.sections if s.at < trial.began < s.end and s.begin.key != TICK]
    return [
        f"`{trial.service}`",
        f"`{trial.action}`",
        _kept(held),
        f"{_gap(story.events, trial, lambda event: event.key != TICK):.1f}",
        f"{_gap(story.events, trial, lambda event: event.key == TICK):.1f}",
        str(sum(found.kind in TOGETHER for found in mine)),
        str(sum(found.kind == "lost task" for found in mine)),
        str(sum(found.kind == "double run" for found in mine)),
    ]


def _kept(held: Sequence[Section]) -> str:
    """What became of the locks that were held as it began."""
    if not held:
        return "none was held"
    kept = sum(not section.killed and section.sure >= section.end for section in held)
    killed = sum(section.killed for section in held)
    lost = len(held) - kept - killed
    words = [(kept, "kept"), (lost, "lost"), (killed, "died with it")]
    return ", ".join(f"{number} {word}" for number, word in words if number)


def _gap(events: Sequence[Event], trial: Trial, chosen: Callable[[Event], bool]) -> float:
    """The longest time without a grant, in seconds."""
    times = [
        event.at
        for event in events
        if event.what == "granted" and chosen(event) and trial.began <= event.at <= trial.ended
    ]
    points = [trial.began, *times, trial.ended if not times else times[-1]]
    return max(second - first for first, second in itertools.pairwise(points)) / 1e9


HEAD = (
    "service",
    "what was done to it",
    "locks held just then",
    "longest time without a grant (s)",
    "longest time without a firing of beat (s)",
    "two holders of a lock, or late writes accepted",
    "tasks lost",
    "tasks run again after their end",
)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def where() -> str:
    """When and on what it was done."""
    version = docker("version", "--format", "{{.Server.Version}}")
    day, load = time.strftime("%Y-%m-%d"), os.getloadavg()[2]
    return f"{day}, Docker {version}, {os.cpu_count()} CPUs with a load of {load:.1f}."


def write(name: str, text: str) -> None:
    """Put a table between its marks, in the page that has them."""
    marked = re.compile(rf"(<!-- begin: {name}\b.*? -->\n).*?(<!-- end -->)", re.DOTALL)
    [path] = [path for path in PAGES if marked.search(path.read_text())]
    path.write_text(marked.sub(lambda found: found[1] + text + found[2], path.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", action="store_true", help="do it to examples/cluster")
    parser.add_argument("--services", help="which of them alone, behind commas")
    parser.add_argument("--directory", type=Path, help="for the record; kept if it is named")
    parser.add_argument("--dry", action="store_true", help="print the tables, write no page")
    options = parser.parse_args()
    if not engine.answers():
        print("outcomes: skipped, no Docker engine answers")
        return 0
    engine.build()
    topology = CLUSTER if options.cluster else ALONE
    services = options.services.split(",") if options.services else topology.services
    tables = {} if options.cluster else {"figures": table(("what", ""), figures.rows())}
    with contextlib.ExitStack() as opened:
        directory = options.directory or Path(opened.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o777)
        trials = []
        with running(topology, directory.resolve()) as project:
            run = Run(project)
            for trial in run.trials(services):
                print(f"{trial.service}: {trial.action}", flush=True)
                trials.append(trial)
            run.settle()
        events = read(directory / HISTORY)
    findings, story = check(events), Story(events)
    for found in findings:
        print(f"{found.kind}: {found.text}")
    tables[topology.name] = table(HEAD, [row(trial, story, findings) for trial in trials])
    tables[topology.name] += (
        f"\n{len(story.sections)} sections, {len(findings)} findings. {where()}\n"
    )
    for name, text in tables.items():
        print(text)
        if not options.dry:
            write(name, text)
    return int(any(found.kind in TOGETHER for found in findings))


if __name__ == "__main__":
    sys.exit(main())
