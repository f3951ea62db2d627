"""Write what is derived from code into the docs: ``python docs/generate.py [--check]``.

With ``--check`` nothing is written, and the exit status is 1 if a page is out of date.
"""

import re
import sys
from pathlib import Path

from dflockd.config import SETTINGS

PAGE = Path(__file__).with_name("configuration.md")
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


def main() -> int:
    text = PAGE.read_text()
    made = MARKED.sub(lambda found: found[1] + settings_table() + found[2], text)
    if "--check" in sys.argv[1:]:
        return int(made != text)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
