"""A lock server with a journal in small pieces: it turns over all the time and not once an hour."""

import sys

from dflockd.cli import main
from dflockd.storage import journal

if __name__ == "__main__":
    assert hasattr(journal, "SEGMENT")
    journal.SEGMENT = 8 << 10
    sys.exit(main())
