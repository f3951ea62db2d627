"""Write what is derived from code into the docs: ``python docs/generate.py [--check]``.

The settings of the server come from `dflockd.config`, the commands from `celery_dflock.cli`, the tests
of what is promised from tests/promises.toml, and whose repository it is from pyproject.toml. Links of a
README become absolute, for a package index shows it far from the files that it names. With ``--check``
nothing is written, and the exit status is 1 if a file is out of date.
"""

import re
import sys
import tomllib
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
READMES = (ROOT / "README.md", ROOT / "server" / "README.md")
MARKED = re.compile(r"(<!-- begin: .*? -->\n).*?(<!-- end -->)", re.DOTALL)
LINKING = (
    "*.md",
    ".github/**/*.yml",
    "docs/**/*.md",
    "server/README.md",
    "server/pyproject.toml",
    "pyproject.toml",
)
"""What has links to the repository, or to its pages."""


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


def absolute(text: str) -> str:
    """The text with links that lead to the repository from everywhere."""
    owner, name = source()
    files = f"https://github.com/{owner}/{name}/blob/main"
    images = f"https://raw.githubusercontent.com/{owner}/{name}/main"
    text = re.sub(r'((?:src|srcset)="|\]\()(docs/images/)', rf"\g<1>{images}/\g<2>", text)
    return re.sub(r"\]\((docs/|examples/|[A-Z]+(?:\.md)?\))", rf"]({files}/\g<1>", text)


def source() -> tuple[str, str]:
    """The owner and the name of the repository, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    owner, name = project["urls"]["Source"].removeprefix("https://github.com/").split("/")
    return owner, name


def with_owner(text: str) -> str:
    """The text with links to the repository of this owner."""
    owner, name = source()
    hosts = r"https://(?:github|raw\.githubusercontent)\.com/"
    text = re.sub(rf"({hosts})[\w.-]+(?=/{name}\b)", rf"\g<1>{owner}", text)
    return re.sub(rf"https://[\w-]+(?=\.github\.io/{name}\b)", f"https://{owner}", text)


def pages() -> Iterator[tuple[Path, str]]:
    """Each file with something derived in it, and what should be in the file."""
    made = {CONFIGURATION: settings_table, COMMANDS: commands, PROMISES: promises.page}
    for path in sorted({path for pattern in LINKING for path in ROOT.glob(pattern)}):
        text = with_owner(path.read_text())
        if path in READMES:
            text = absolute(text)
        if make := made.get(path):
            made_text = make()
            text = MARKED.sub(lambda found, made=made_text: found[1] + made + found[2], text)
        yield path, text


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
