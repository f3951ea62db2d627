"""The command ``dflockd``, and ``python -m dflockd``."""

import os
import signal
import sys


def main() -> int:
    """Run the command; return the exit status."""
    if sys.stderr is None:
        # Started without: what is opened next would get its number, and the log.
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    # By default it ends the process. One that comes during the imports waits; see `dflockd.cli`.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    from dflockd import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
