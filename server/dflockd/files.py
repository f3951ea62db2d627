"""Files that settings name: secrets, certificates and keys."""

from __future__ import annotations

import errno
import os
import stat
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
