"""Write what is derived from code into the docs: ``python docs/generate.py [--check]``.

The settings of the server come from `dflockd.config`, the commands from `celery_dflock.cli`, and the
tests of what is promised from tests/promises.toml. With ``--check`` nothing is written, and the exit
status is 1 if a file is out of date.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import promises

from celery_dflock.cli import dflock
from dflockd.config import SETTINGS

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION = ROOT / "docs" / "configuration.md"
COMMANDS = ROOT / "docs" / "reference" / "commands.md"
PROMISES = ROOT / "docs" / "reference" / "promises.md"
MARKED = re.compile(r"(<!-- begin: .*? -->\n).*?(<!-- end -->)", re.DOTALL)


def settings_table() -> str:
    rows = ["| flag | variable | default | meaning |", "|---|---|---|---|"]
    for setting in SETTINGS:
        default = "" if setting.default is None else f"`{setting.default}`"
        rows.append(
            f"| `{setting.flag}` | `{setting.variable}` | {default} | "
            f"{setting.help}; {setting.kind.describe} |"
        )
    return "\n".join(rows) + "\n"


def commands() -> str:
    """What `celery dflock` can be asked, command by command."""
    sections = []
    for name, command in sorted(dflock.commands.items()):
        context = click.Context(command, info_name=name)
        usage = " ".join(["celery -A proj dflock", name, *command.collect_usage_pieces(context)])
        rows = [
            f"| `{', '.join(each.opts)}` | {each.help} |"
            for each in command.params
            if isinstance(each, click.Option) and each.help
        ]
        table = ["| option | meaning |", "|---|---|", *rows, ""] if rows else []
        text = re.sub(r"\n[ \t]+", "\n", command.help or "").strip()
        sections.append("\n".join([f"## {name}", "", f"    {usage}", "", text, "", *table]))
    return "\n".join(sections)


def pages() -> Iterator[tuple[Path, str]]:
    """Each file with something derived in it, and what should be in the file."""
    made = {CONFIGURATION: settings_table, COMMANDS: commands, PROMISES: promises.page}
    for path, make in made.items():
        text = make()
        yield (
            path,
            MARKED.sub(lambda found, text=text: found[1] + text + found[2], path.read_text()),
        )


def main() -> int:
    stale = [(path, text) for path, text in pages() if path.read_text() != text]
    for path, text in stale:
        if "--check" in sys.argv[1:]:
            print(f"{path.relative_to(ROOT)} is out of date", file=sys.stderr)
        else:
            path.write_text(text)
    return int("--check" in sys.argv[1:] and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
