"""The unix socket: one server for each path, and nobody else's file touched."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

from dflockd.server.listener import BACKLOG

OTHERS_START = 5.0
"""Seconds to wait for others that start on the same path."""


class SocketPathError(OSError):
    """The path cannot be listened on; the text says why."""


class UnixSocket:
    """A socket that listens on a path, and the path as it was made.

    Made by `bind`.
    """

    def __init__(self, path: Path, sock: socket.socket) -> None:
        self.sock = sock
        self._path = path
        self._identity = _identity(path)

    @classmethod
    async def bind(cls, path: str, mode: int | None) -> UnixSocket:
        """Listen on `path`.

        Args:
            path: where. What a server that has ended has left there is replaced.
            mode: permissions of the socket; without it, what the umask leaves.

        Raises:
            SocketPathError: another server lives there, or there can be no socket.
        """
        where = Path(path)
        if where.name in ("", ".."):
            raise SocketPathError("it is a directory")
        try:
            async with _alone_at(where):
                _clear(where)
                return cls(where, _listening(path, mode))
        except SocketPathError:
            raise
        except OSError as exc:
            raise SocketPathError(exc.strerror or str(exc)) from None

    def remove(self) -> None:
        """Take the path away, if it is still the one that was made here.

        Before the socket is closed: as long as it listens, nobody else takes the path for free.
        """
        with contextlib.suppress(OSError):
            if _identity(self._path) == self._identity:
                self._path.unlink()


def _listening(path: str, mode: int | None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
        if mode is not None:
            # Nobody can connect before it listens.
            Path(path).chmod(mode)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


@contextlib.asynccontextmanager
async def _alone_at(path: Path) -> AsyncIterator[None]:
    """Keep others from looking and binding at the same time: two could find one path free.

    The lock is a file of its own, that only its owner can open: a user that may
    only look into the directory cannot hold up a start. It stays, for to delete it would let two in.
    """
    name = path.with_name(f"{path.name}.lock")
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise SocketPathError(f"{name}: {exc.strerror}") from None
    try:
        async with asyncio.timeout(OTHERS_START):
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                await asyncio.sleep(0.02)
        yield
    except TimeoutError:
        raise SocketPathError(f"another process holds {name}") from None
    finally:
        os.close(lock)


def _clear(path: Path) -> None:
    """Remove the socket of a server that has ended; raise if there is anything else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketPathError("there is a file of that name, which is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        found = probe.connect_ex(os.fspath(path))
    if found == errno.ECONNREFUSED:
        path.unlink()
    elif found in (0, errno.EAGAIN):
        raise SocketPathError("another server listens there")
    elif found != errno.ENOENT:
        raise SocketPathError(f"there is a socket of that name: {os.strerror(found)}")
