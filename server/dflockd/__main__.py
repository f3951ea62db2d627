"""``python -m dflockd``: the same as the command ``dflockd``."""

import sys

from dflockd.cli import main

if __name__ == "__main__":
    sys.exit(main())
