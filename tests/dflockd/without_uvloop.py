"""The server on plain asyncio: hiding the module is all it takes."""

import sys

from dflockd.cli import main

if __name__ == "__main__":
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    sys.exit(main())
