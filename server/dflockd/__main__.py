"""The command ``dflockd``, and ``python -m dflockd``."""

import sys

from dflockd.hangup import Hangups


def main() -> int:
    """Run the command; return the exit status."""
    hangups = Hangups()
    # What takes a moment to import: a SIGHUP in that time is kept.
    from dflockd import cli

    return cli.main(hangups=hangups)


if __name__ == "__main__":
    sys.exit(main())
