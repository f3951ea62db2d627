"""One directory on a disk: the few things that storage asks of the operating system.

Everything that storage writes, syncs, renames or deletes goes through here. So a test can record what
a real run did, in order, and try every state that a power cut could have left.
"""

from __future__ import annotations

import errno
import fnmatch
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dflockd.files import refuse_irregular


class Mapped:
    """A file in memory. What is copied into it is the kernel's, whatever happens to the process.

    Attributes:
        data: its bytes, to copy a record into.
        words: the same as numbers of eight bytes. One is replaced in one instruction: a process that
            is killed leaves the old number or the new one, never a mixture.
    """

    __slots__ = ("data", "words")

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.words = memoryview(data).cast("Q")

    def close(self) -> None:
        """Let go of the memory. The file has all that was copied."""
        self.words.release()
        self.data.close()


class Disk:
    """A directory and the files in it, by name. Every method raises `OSError` if it fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make the directory if it is missing, for this user alone; its parent is not made.

        A user that may only read a directory could lock it, and keep every server from starting. So
        a directory of this user is closed to others. One of somebody else, such as a volume that a
        group may use, stays as it is.
        """
        self.path.mkdir(mode=0o700, exist_ok=True)
        with suppress(PermissionError):
            if self.path.stat().st_mode & 0o077:
                self.path.chmod(0o700)
        # Or a power cut could take the directory, and with it all that is known of its holders.
        with suppress(PermissionError):
            _sync_directory(self.path.parent)

    # What is there.

    def names(self, pattern: str) -> list[str]:
        """Return the names that match, in order."""
        # Not `glob`: to it, a directory that it may not read is empty.
        return sorted(fnmatch.filter([path.name for path in self.path.iterdir()], pattern))

    def free(self) -> int:
        """Return the bytes that are free for this process."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def read(self, name: str) -> bytes:
        """Return what is in a file."""
        path = self.path / name
        refuse_irregular(path)
        return path.read_bytes()

    # What changes it.

    def create(self, name: str, size: int) -> int:
        """Return a new file of zeros, with room on the disk for all of them."""
        path = self.path / name
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # All of it now: a hole that cannot be filled later would end the process.
            _allocate(file, size)
        except BaseException:
            os.close(file)
            path.unlink()
            raise
        return file

    def map(self, file: int, size: int) -> Mapped:
        """Return a file in memory."""
        return Mapped(mmap.mmap(file, size))

    def close(self, file: int) -> None:
        """Let go of a file."""
        os.close(file)

    def write(self, file: int, data: bytes, position: int) -> None:
        """Replace some bytes of a file."""
        while data:
            written = os.pwrite(file, data, position)
            data, position = data[written:], position + written

    def sync(self, file: int) -> None:
        """Return once all that was written to a file is on the disk, also through its memory.

        A file that somebody has deleted is on no disk: the next process would not find it.
        """
        _sync(file)
        if not os.fstat(file).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "a file was deleted while it was in use")

    def sync_names(self) -> None:
        """Return once it is on the disk which files there are."""
        _sync_directory(self.path)

    def rename(self, name: str, new: str) -> None:
        """Rename a file, and replace the file that had the name."""
        (self.path / name).replace(self.path / new)

    def replace(self, name: str, data: bytes) -> None:
        """Give a file another content in one step, and have that on the disk on return."""
        new = f"{name}.new"
        self.unlink([new])  # of a process that ended in the middle of this
        file = self.create(new, 0)
        try:
            self.write(file, data, 0)
            self.sync(file)
        finally:
            self.close(file)
        self.rename(new, name)
        self.sync_names()

    def unlink(self, names: Iterable[str]) -> None:
        """Delete files; one that is not there is not missed."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)


def _sync(file: int) -> None:
    # As fsync, but for when the file was changed last.
    getattr(os, "fdatasync", os.fsync)(file)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _allocate(file: int, size: int) -> None:
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as exc:
            if exc.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
        else:
            return
    written = 0
    while written < size:
        written += os.pwrite(file, bytes(size - written), written)
