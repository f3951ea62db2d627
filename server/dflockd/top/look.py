"""What somebody at the keyboard wants to see, and what their keys change. Pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KEYS, WAITERS = "keys", "waiters"
"""The views: a line for each key, or for each waiter."""

HELP = (
    ("Up Down PgUp PgDn", "scroll; Home, End"),
    ("/ F3 F4", "show only what has a text: a task, an id, a host, a key; Esc shows all again"),
    ("w Tab", "keys, or who waits, longest first"),
    ("s F6 > <", "the next order, the one before"),
    ("i", "ids in full, or their first eight characters"),
    ("h ? F1", "this"),
    ("q F10 Ctrl-C", "quit"),
)
"""The keys of the keyboard, as in htop where it has them."""

_NAMES = {
    "up": ("\x1b[A", "\x1bOA", "k"),
    "down": ("\x1b[B", "\x1bOB", "j"),
    "page up": ("\x1b[5~",),
    "page down": ("\x1b[6~", " "),
    "home": ("\x1b[H", "\x1bOH", "\x1b[1~", "g"),
    "end": ("\x1b[F", "\x1bOF", "\x1b[4~", "G"),
    "filter": ("/", "\\", "\x1bOR", "\x1bOS", "\x1b[13~", "\x1b[14~"),
    "view": ("w", "W", "\t"),
    "sort": ("s", "S", ">", ".", "\x1b[17~"),
    "sort back": ("<", ","),
    "ids": ("i", "I"),
    "help": ("h", "H", "?", "\x1bOP", "\x1b[11~"),
    "quit": ("q", "Q", "\x1b[21~"),
}
_MEANING = {key: name for name, keys in _NAMES.items() for key in keys}
_KEY = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z])|.", re.DOTALL)


def keys_in(text: str) -> Iterator[str]:
    """Cut what a terminal sent into keys: a sequence for an arrow or a function key is one."""
    return (found[0] for found in _KEY.finditer(text))


@dataclass(slots=True)
class Look:
    """What is shown.

    Attributes:
        sorts: the orders that there are.
        sort: the name of the order.
        view: `KEYS` or `WAITERS`.
        filter: a text that what is shown has in it; empty for all.
        top: how many lines are above what is shown.
        is_typing: whether the filter is being typed.
        full_ids: whether ids are shown whole.
        helps: whether the keys are shown instead.
    """

    sorts: Sequence[str]
    sort: str
    view: str = KEYS
    filter: str = ""
    top: int = 0
    is_typing: bool = False
    full_ids: bool = False
    helps: bool = False

    def press(self, key: str, page: int) -> bool:
        """Do what a key says; return whether to go on.

        Args:
            key: one of `keys_in`.
            page: lines that are shown at a time.
        """
        if self.is_typing:
            self._type(key)
            return True
        if self.helps:
            self.helps = False  # any key ends it
            return _MEANING.get(key) != "quit"
        if key == "\x1b":
            self.filter, self.top = "", 0
            return True
        match _MEANING.get(key):
            case "quit":
                return False
            case "up":
                self.top -= 1
            case "down":
                self.top += 1
            case "page up":
                self.top -= page
            case "page down":
                self.top += page
            case "home":
                self.top = 0
            case "end":
                self.top = sys.maxsize
            case "filter":
                self.is_typing = True
            case "view":
                self.view, self.top = KEYS if self.view == WAITERS else WAITERS, 0
            case "sort":
                self._turn(1)
            case "sort back":
                self._turn(-1)
            case "ids":
                self.full_ids = not self.full_ids
            case "help":
                self.helps = True
        self.top = max(0, self.top)
        return True

    def keep_within(self, lines: int, page: int) -> None:
        """Scroll back where there is less than that to show."""
        self.top = max(0, min(self.top, lines - page))

    def _turn(self, step: int) -> None:
        self.sort = self.sorts[(self.sorts.index(self.sort) + step) % len(self.sorts)]
        self.view, self.top = KEYS, 0

    def _type(self, key: str) -> None:
        if key in "\r\n":
            self.is_typing = False
        elif key == "\x1b":
            self.is_typing, self.filter = False, ""
        elif key in "\x7f\b":
            self.filter = self.filter[:-1]
        elif key == "\x15":  # Ctrl-U
            self.filter = ""
        elif key.isprintable() and len(self.filter) < 60:
            self.filter += key
        self.top = 0
