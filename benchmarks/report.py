"""``python -m benchmarks.report``: the figures that the README and the manual print, and the plot.

They come from the record. Between its marks a page is rewritten, everything else is left as it is.
With ``--check`` nothing is written, and the exit status is 1 if a page does not have the figures of
the record.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.loads import cluster_scale, renewals, server_cpu
from benchmarks.record import Record
from benchmarks.table import number, verdict, wanted
from examples.demo import stage

PAGE = stage.ROOT / "docs" / "speed.md"
PAGES = (
    PAGE,
    stage.ROOT / "README.md",
    stage.ROOT / "docs" / "waiting.md",
    stage.ROOT / "docs" / "explanation" / "cluster.md",
)
MARKED = re.compile(r"(<!-- begin: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
DAY = 86_400
WAITS = ("waiting-others", "waiting-overtaken")
NOT_MEASURED = "not measured"
SHOWN = 0.025
"""The least share of a part that is shown by itself."""

COMPARED = {
    "tasks-redis": "Tasks per second of a worker, Redis",
    "tasks-rabbitmq": "Tasks per second of a worker, RabbitMQ",
    "task-cpu": "CPU that a lock adds to a Celery task, all processes, µs",
    "with-lock-tcp": "“with lock: pass” in a program, TCP, µs",
    "hand-off": "From a release to the next holder, ms",
    "server-cpu-64": "Server CPU of a lock, 64 connections, µs",
}
"""The topics of the README and of the plot, and what is written above each."""

LABELS = {
    "a server that does not look": "fixed answers (uvloop)",
    "bare socket, same exchange": "bare socket",
    "bare sockets, same exchange": "bare sockets",
    "redis-py Lock in the body": "redis-py Lock",
}


class Figures:
    """The record, asked by topic and name."""

    def __init__(self, document: Record) -> None:
        self.document = document
        self.topics: dict[str, Any] = {topic["key"]: topic for topic in document["topics"]}

    def median(self, key: str, name: str | None = None) -> float | None:
        """Return a median, ours unless named; ``None`` if it was not measured."""
        topic = self.topics.get(key)
        if topic is None:
            return None
        found: float | None = topic["medians"].get(name or topic["ours"])
        return found

    def shown(
        self,
        key: str,
        name: str | None = None,
        show: Callable[[float], str] = number,
    ) -> str:
        median = self.median(key, name)
        return NOT_MEASURED if median is None else show(median)


def rows(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown."""
    head = list(head)
    table = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in table)


def run(figures: Figures) -> str:
    """When, where and of what."""
    document, machine = figures.document, figures.document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    text = (
        f"Measured on {document['date'][:10]} in {document['seconds'] / 60:.0f} minutes, commit "
        f"`{document['commit']}`, {document['rounds']} rounds, on {machine['cores']} cores of "
        f"{machine['processor']} ({machine['system']}) with a load of {machine['load']:.1f} before and "
        f"{document['load after']:.1f} after, "
        f"Python {document['python']}, our server {document['server']}; {versions}.\n"
    )
    for name, why in document["left_out"].items():
        text += f"\nLeft out: {name}: {why}.\n"
    return text


def goals(figures: Figures) -> str:
    """Every figure that has a goal."""
    lines = []
    for topic in figures.topics.values():
        if topic["ours"] not in topic["medians"]:
            continue
        name = f"{topic['title']}, {topic['unit']}"
        ours = number(topic["medians"][topic["ours"]])
        if limit := topic.get("limit"):
            lines.append([name, ours, "", "", "", wanted(topic, limit), verdict(limit)])
        for other, ratio in topic["ratios"].items():
            if "goal" not in ratio:
                continue
            theirs = f"{other}: {number(topic['medians'][other])}"
            median = f"**{number(ratio['median'])}**"
            lines.append(
                [name, ours, theirs, median, spread(ratio), wanted(topic, ratio), verdict(ratio)]
            )
    head = ["what", "ours", "compared with", "ratio", "spread", "goal / aim", ""]
    return rows(head, lines)


def spread(ratio: dict[str, Any]) -> str:
    """How far the rounds agree."""
    number_of = len(ratio["each"])
    return f"{ratio['spread']:.0%} of {number_of}" if number_of > 1 else "counted"


def counts(figures: Figures) -> str:
    """What was counted, beside others."""
    lines = []
    for topic in figures.topics.values():
        if topic["unit"] != "Ir" or not topic["ours"]:
            continue
        title = topic["title"]
        for name, median in topic["medians"].items():
            ratio = topic["ratios"].get(name)
            share = f"{ratio['median']:.2g}" if ratio else ""
            lines.append([title, name, counted(median), share])
            title = ""
    return rows(["", "", "", "ours to theirs"], lines or [[NOT_MEASURED, "", "", ""]])


def parts(figures: Figures) -> str:
    """Where they are, of what is ours."""
    lines = []
    for topic in figures.topics.values():
        if topic["unit"] != "Ir" or topic["ours"]:
            continue
        title, medians = topic["title"], topic["medians"]
        whole = sum(medians.values())
        shown = {name: each for name, each in medians.items() if each / whole >= SHOWN}
        if rest := whole - sum(shown.values()):
            shown[f"{len(medians) - len(shown)} more"] = rest
        for name, each in sorted(shown.items(), key=lambda item: -item[1]):
            lines.append([title, name, counted(each), f"{each / whole:.0%}"])
            title = ""
    return rows(["", "", "", ""], lines or [[NOT_MEASURED, "", "", ""]])


def counted(instructions: float) -> str:
    return f"{round(instructions, -2):,.0f}"


def summary(figures: Figures) -> str:
    """What the README shows."""
    document, machine = figures.document, figures.document["machine"]
    lines = []
    for key, title in COMPARED.items():
        medians = figures.topics.get(key, {"medians": {}})["medians"]
        ours, *others = [
            f"{LABELS.get(name, name)} {number(value)}" for name, value in medians.items()
        ] or [NOT_MEASURED]
        lines.append([title, f"**{ours}**", "; ".join(others)])
    return (
        rows(["", "ours", "compared with"], lines)
        + f"\n{document['date'][:10]}, {machine['cores']} cores of {machine['processor']}, our server "
        f"{document['server']}.\n"
    )


def rate(microseconds: float) -> str:
    """Return how many a second that is, in thousands."""
    return f"{round(1e6 / microseconds, -3):,.0f}"


def sizing(figures: Figures) -> str:
    """What somebody wants to know who has to choose a machine."""
    shown, renewed = figures.shown, f"{renewals.HELD:,}"

    def mebibytes(each: int) -> Callable[[float], str]:
        return lambda size: f"{size * each / (1 << 20):,.0f} MiB"

    def per_day(share: float) -> str:
        return f"{share:.2g} %; {share / 100 * DAY / 60:,.0f} minutes of CPU a day"

    lines = [
        [
            f"locks per second that fill a core of the server, {each} connections",
            shown(f"server-cpu-{each}", show=rate),
        ]
        for each in server_cpu.CONNECTIONS
    ]
    lines += [
        ["the wait for a lock that is free", shown("wait-free") + " µs"],
        ["from a release to the next holder", shown("hand-off") + " ms"],
        ["100,000 held locks", shown("memory-lock", show=mebibytes(100_000))],
        ["10,000 idle connections", shown("memory-connection", show=mebibytes(10_000))],
        [
            f"keeping {renewed} locks, leases of {renewals.LEASE} s: of the server's core (*)",
            shown("renewals-server", show=per_day),
        ],
        ["the same, of the program that holds them (*)", shown("renewals-client", show=per_day)],
    ]
    return rows(["", "here"], lines)


def grown(figures: Figures) -> str:
    """What becomes of the cost of a lock as there is more of something."""
    lines = []
    for kind, what, memory in (
        ("held", "locks held", "lock"),
        ("connections", "connections that take locks all the time", "connection"),
        ("waiters", "waiters of one key", "waiter"),
    ):
        topic = figures.topics.get(f"growth-{kind}", {"medians": {}})
        costs = "; ".join(
            f"{name}: {number(each)}"
            for name, each in sorted(topic["medians"].items(), key=lambda item: how_many(item[0]))
        )
        size = figures.shown(f"memory-{memory}", show=lambda size: f"{number(size)} B")
        lines.append([what, costs or NOT_MEASURED, f"{size} for each {memory}"])
    return rows(["what there is more of", "CPU per acquire + release, µs", "memory"], lines)


def how_many(name: str) -> int:
    """Return the number with which a name begins."""
    return int(name.split()[0].replace(",", ""))


def waits(figures: Figures) -> str:
    """What those who wait for one lock cost the others."""
    lines = [
        [way, *(figures.shown(key, way, lambda each: f"{each:.2g}") for key in WAITS)]
        for way in figures.topics.get("waiting-others", {"medians": {}})["medians"]
    ]
    lines = lines or [[NOT_MEASURED, "", ""]]
    return rows(["they wait", "speed of the others, without them = 1", "overtaken"], lines)


def cluster(figures: Figures) -> str:
    """What happens in a large cluster, and what it costs etcd."""
    first = next(iter(cluster_scale.SHOWN))
    lines = [
        [what, *(figures.shown(f"cluster-{field}", what) for field in cluster_scale.SHOWN)]
        for what in figures.topics.get(f"cluster-{first}", {"medians": {}})["medians"]
    ]
    head = [f"{what}, {unit}" if unit else what for what, unit in cluster_scale.SHOWN.values()]
    return rows(["", *head], lines or [[NOT_MEASURED] + [""] * len(head)])


BLOCKS: dict[str, Callable[[Figures], str]] = {
    "run": run,
    "goals": goals,
    "sizing": sizing,
    "growth": grown,
    "counts": counts,
    "parts": parts,
    "summary": summary,
    "waiting": waits,
    "cluster": cluster,
}


def pages(document: Record) -> dict[Path, str]:
    """Return `PAGES` with the figures of this record."""
    figures = Figures(document)

    def written(path: Path) -> str:
        return MARKED.sub(
            lambda found: found[1] + BLOCKS[found[2]](figures) + found[3], path.read_text()
        )

    return {path: written(path) for path in PAGES}


def write(document: Record) -> list[Path]:
    """Write the pages and the plots; return what was written."""
    from benchmarks import plots

    found = pages(document)
    for path, text in found.items():
        path.write_text(text)
    return [*found, *plots.draw(document)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("record", nargs="?", type=Path, default=record.RESULTS)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    document = record.read(arguments.record)
    if arguments.check:
        return int(any(text != path.read_text() for path, text in pages(document).items()))
    for path in write(document):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
