"""What the locks protect: a resource that compares fences, in files that processes share.

It remembers the largest fence that it has seen for each key, and refuses what comes with a smaller
one: the late write of a former holder (Kleppmann, "How to do distributed locking", 2016).
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tests.chaos.history import Recorder


class FencedResource:
    """A value for each key, in a file of `directory`."""

    def __init__(self, directory: str | Path, recorder: Recorder) -> None:
        self._directory = Path(directory)
        self._recorder = recorder

    def write(self, key: str, fence: int, who: str) -> bool:
        """Write under a fence; whether it was accepted."""
        path = self._directory / f"{key}.resource"
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # The end of the process unlocks it as well.
            fcntl.flock(file, fcntl.LOCK_EX)
            largest = int(os.pread(file, 32, 0) or b"0")
            accepted = fence >= largest
            if accepted:
                os.pwrite(file, b"%032d" % fence, 0)
            # Still under the file's lock: the record has them in the order of the resource.
            self._recorder.note(
                "accepted" if accepted else "refused", key=key, fence=fence, who=who
            )
            return accepted
        finally:
            os.close(file)
