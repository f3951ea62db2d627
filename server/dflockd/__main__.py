"""The command ``dflockd``, and ``python -m dflockd``."""

import signal
import sys


def main() -> int:
    """Run the command; return the exit status."""
    # By default it ends the process. One that comes during the imports waits; see `dflockd.cli`.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    from dflockd import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
