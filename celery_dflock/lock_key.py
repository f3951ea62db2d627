"""What a finished key is."""

from __future__ import annotations


class LockKey(str):
    """A finished key: as the lock server has it, with the app's prefix in front.

    `LockedTask.lock_keys` makes those of a call, and ``current_lock().key`` is one. `dflock`, the
    testing helpers and a function as ``lock_key`` take it as it is, where they would encode a text
    and put the prefix in front. JSON turns it into a text: ``LockKey(text)`` makes it one again.
    """

    __slots__ = ()
