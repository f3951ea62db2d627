"""Files that settings name: secrets, certificates and keys."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import ssl
import stat
from datetime import UTC, datetime
from pathlib import Path


def refuse_irregular(*paths: str | os.PathLike[str] | None) -> None:
    """Refuse everything but regular files and links to them.

    To open a named pipe waits until somebody writes into it, so a program would hang at its start.
    Paths that do not exist are left to the function that opens them; ``None`` is skipped.

    Raises:
        OSError: a path leads to something else.
    """
    for path in paths:
        if path is None:
            continue
        try:
            mode = Path(path).stat().st_mode
        except OSError:
            continue
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))


def read_secret(path: str) -> str:
    """Return the one line of a file.

    Raises:
        ValueError: the file cannot be used. The text says why and shows nothing of the secret; it is
            made to stand behind the path.
    """
    try:
        refuse_irregular(path)
        text = Path(path).read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as exc:
        raise ValueError(f"cannot be read: {exc.strerror}") from None
    except UnicodeDecodeError:  # which would show a part of it
        raise ValueError("is not UTF-8 text") from None
    if not text or "\n" in text or "\0" in text:
        raise ValueError("must hold one line that is not empty")
    return text


class SecretFile:
    """A secret that may be exchanged in its file while it is in use.

    Raises:
        ValueError: the file cannot be used; see `read_secret`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.latest = read_secret(path).encode()
        """As it was read last."""

    def read(self) -> bytes:
        """Read it; while the file cannot be used, it is the one that it was."""
        with contextlib.suppress(ValueError):
            self.latest = read_secret(self.path).encode()
        return self.latest


def not_after(path: str) -> float:
    """Return until when all certificates of a PEM file are good, in Unix time; 0 if unreadable.

    Python's `ssl` says so of nobody's certificate but the other side's.
    """
    try:
        return min(map(_not_after, certificates(path)), default=0.0)
    except (ValueError, IndexError):
        return 0.0


def certificates(path: str) -> list[bytes]:
    """Return the certificates of a PEM file in their binary form; none if it cannot be read."""
    try:
        blocks = _PEM.findall(Path(path).read_text("ascii", "replace"))
        return [ssl.PEM_cert_to_DER_cert(block) for block in blocks]
    except (OSError, ValueError):
        return []


def _not_after(data: bytes) -> float:
    at, _ = _inside(data, 0)  # the certificate
    at, _ = _inside(data, at)  # what is signed of it
    if data[at] == _VERSION:
        at = _inside(data, at)[1]
    for _ in range(3):  # serial number, algorithm, issuer
        at = _inside(data, at)[1]
    at, _ = _inside(data, at)  # validity
    at = _inside(data, at)[1]  # from when
    start, end = _inside(data, at)
    form = "%y%m%d%H%M%SZ" if data[at] == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(data[start:end].decode(), form).replace(tzinfo=UTC).timestamp()


_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17


def _inside(data: bytes, at: int) -> tuple[int, int]:
    """Return where the content of a DER item begins, and where the next item does."""
    length, at = data[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, at = int.from_bytes(data[at : at + size]), at + size
    return at, at + length
