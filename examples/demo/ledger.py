"""Account balances in files, with no protection of their own.

A task that reads a balance, works, and writes back the sum overwrites what others wrote meanwhile.
"""

from __future__ import annotations

import os
from pathlib import Path


class Ledger:
    """The balances of the accounts of one book, in files of `directory`."""

    def __init__(self, directory: str | Path, book: str) -> None:
        self._directory = Path(directory)
        self._book = book

    def balance(self, account: int) -> int:
        try:
            return int(self._file(account).read_text())
        except FileNotFoundError:
            return 0

    def write(self, account: int, balance: int) -> None:
        """Replace the balance; a reader sees the old one or the new one, never half of one."""
        draft = self._file(account).with_suffix(f".{os.getpid()}")
        draft.write_text(str(balance))
        draft.replace(self._file(account))

    def _file(self, account: int) -> Path:
        return self._directory / f"{self._book}-{account}.balance"
