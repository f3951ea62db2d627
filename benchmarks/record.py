"""What a run has given, as a JSON document: the machine, the versions, every figure, the ratios."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from benchmarks import published
from benchmarks.bench import Bench
from benchmarks.topic import Figures, Goal, Topic
from examples.demo import stage

RESULTS = Path(__file__).parent / "results.json"
COMPARED = (
    "celery-dflock",
    "dflockd-py",
    "uvloop",
    "celery",
    "redis",
    "celery-once",
    "celery-singleton",
)

Record: TypeAlias = dict[str, Any]


STEADY = 0.2
"""The most that `spread` may be, else there are more rounds."""


class Rounds:
    """The figures of all rounds, in the order of the topics."""

    def __init__(self) -> None:
        self._topics: dict[str, Topic] = {}
        self._figures: dict[str, dict[str, list[float]]] = {}

    def add(self, topics: Sequence[Topic], figures: Figures) -> None:
        """Add one round of these topics."""
        for topic in topics:
            self._topics[topic.key] = topic
            rows = self._figures.setdefault(topic.key, {})
            # Ours comes first, whoever was first in this round.
            for name in sorted(figures[topic.key], key=lambda name: name != topic.ours):
                rows.setdefault(name, []).append(figures[topic.key][name])

    def summaries(self) -> list[Record]:
        """Return an entry for each topic."""
        return [summary(topic, self._figures[key]) for key, topic in self._topics.items()]

    def are_steady(self, topics: Iterable[Topic]) -> bool:
        """Return whether the rounds of these topics agree on every ratio that has a goal."""
        return not any(
            "goal" in each and each["spread"] > STEADY
            for topic in topics
            for each in summary(topic, self._figures[topic.key])["ratios"].values()
        )


def summary(topic: Topic, figures: Mapping[str, Sequence[float]]) -> Record:
    """Return what a topic's rounds have given."""
    entry: Record = {
        "key": topic.key,
        "title": topic.title,
        "unit": topic.unit,
        "ours": topic.ours,
        "more_is_better": topic.more_is_better,
        "figures": {name: list(values) for name, values in figures.items()},
        "medians": {name: statistics.median(values) for name, values in figures.items()},
        "ratios": {},
    }
    ours = figures.get(topic.ours, [])
    for name, theirs in figures.items() if ours else ():
        # What a lock adds is a difference, and can drown: then a round has no ratio.
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a > 0 and b > 0]
        if pairs and name != topic.ours:
            entry["ratios"][name] = ratio(topic, pairs, topic.goals.get(name))
    if topic.limit is not None:
        entry["limit"] = judged(topic, topic.limit, entry["medians"][topic.ours])
    return entry


def ratio(topic: Topic, pairs: Sequence[tuple[float, float]], goal: Goal | None) -> Record:
    """Return ours to theirs within each round, and whether the median is as wanted."""
    each = [mine / other for mine, other in pairs]
    median = statistics.median(each)
    entry: Record = {"each": each, "median": median, "least": min(each), "most": max(each)}
    entry["spread"] = spread(each)
    return entry | judged(topic, goal, median) if goal else entry


def judged(topic: Topic, goal: Goal, value: float) -> Record:
    """Return what is wanted, and whether it is so."""

    def reached(wanted: float) -> bool:
        return value >= wanted if topic.more_is_better else value <= wanted

    entry: Record = {"goal": goal.must, "reached": reached(goal.must)}
    if goal.aim is not None:
        entry |= {"aim": goal.aim, "aim reached": reached(goal.aim)}
    return entry


def spread(values: Sequence[float]) -> float:
    """Return how far the middle half of the values is apart, as a share of their median."""
    if len(values) < 2:
        return 0.0
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / median


def record(
    bench: Bench, rounds: int, seconds: float, where: Record, summaries: list[Record]
) -> Record:
    """Return the whole document; `where` is what `machine` said before."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "seconds": round(seconds),
        "commit": commit(),
        "machine": where,
        "load after": os.getloadavg()[0],
        "python": platform.python_version(),
        "server": "compiled" if bench.compiled else "in plain Python",
        "versions": versions(),
        "rounds": rounds,
        "quick": bench.quick,
        "left_out": bench.left_out,
        "topics": summaries,
    }


def write(path: Path, document: Record) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def read(path: Path = RESULTS) -> Record:
    document: Record = json.loads(path.read_text())
    return document


def commit() -> str:
    """Return the commit that was measured, and ``dirty`` if the tree differs from it."""
    described = _output("git", "describe", "--always", "--dirty=-dirty", "--abbrev=12")
    return described.replace("-dirty", " dirty") or "unknown"


def machine() -> Record:
    """Return what a reader has to know about this one, how busy it is now included."""
    names = (
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": next(names, "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "load": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Return those of everything compared that is installed."""
    found = {}
    for name in COMPARED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["dflockd in Go"] = published.go_version()
    try:
        told = _output(stage.redis_executable(), "--version").split()
        found["Redis server"] = next((word[2:] for word in told if word.startswith("v=")), "?")
    except stage.StageError:
        found["Redis server"] = "not installed"
    return found


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=stage.ROOT, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
