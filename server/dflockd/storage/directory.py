"""The state directory: what a server must know to go on where it, or its machine, was stopped.

A process that is killed loses nothing: what it wrote is the kernel's (`dflockd.storage.journal`), and a
deadline on the machine's clock means the same to the next process. What the end of the machine may
have taken from the journal, only the holders know. So then the server gives out no lock until every
lease that may be out has ended, and takes back what its clients renew meanwhile: the secret in the
state file tells real tokens from others. (Gray and Cheriton, "Leases", 1989, section 2.)
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dflockd.storage.journal import CorruptError, Journal, any_in
from dflockd.table import Hold, HoldRecord, Limits, LockTable

FORMAT = 1

SECRET = 32
"""Bytes of the secret."""

RESERVED = 1 << 48
"""Fences that no process gives out in all its life; after a crash the next one starts beyond them."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CLOCK_OFFSETS = Path("/proc/self/timens_offsets")

_NEW: dict[str, Any] = {
    "format": FORMAT,
    # What the digests of tokens are keyed with, in hexadecimal.
    "secret": "",
    # Which generation of the journal counts; 0 before the first.
    "generation": 0,
    # On which boot of the machine the times here and in the journal are to be read.
    "boot": "",
    # Whether everything was on the disk when the process ended, and when that was.
    "clean": True,
    "stopped": 0.0,
    # Until when holders that were forgotten are waited for.
    "recovers_until": 0.0,
    # Seconds that no lease exceeds that may be out.
    "longest_lease": 0,
    # A fence beyond all that were given out, should the journal be lost.
    "fence": 0,
}
"""The state file before its first use. All of its fields are these, of these types."""


class StateError(Exception):
    """The directory cannot be used; the text is one line that says what to do about it."""


class StateDir:
    """The state of one server in one directory, which it has for itself.

    Attributes:
        secret: what the digests of tokens are keyed with.
        fence: the largest fence that may have been given out.
        holds: what was held when it was last used.
        recovery: seconds for which holders must be waited for before anything is granted.

    Args:
        path: the directory; it is made if it is missing, its parent is not.
        now: the machine's monotonic clock, which `holds` refer to.
        limits: those of the table that it is for.

    Raises:
        StateError: it cannot be used as it is; no lock in it is forgotten.
    """

    def __init__(self, path: str, now: float, limits: Limits) -> None:
        self._path = Path(path)
        self._limits = limits
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
            self._lock = self._locked()
            try:
                self._read(now)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as exc:
            raise self._unusable(exc) from exc

    def start(self, table: LockTable, now: float) -> None:
        """Give a new table what was kept, and keep from now on what it holds.

        Raises:
            StateError: nothing can be written.
        """
        table.restore(self.holds, now)
        if self.recovery:
            table.recover(now + self.recovery)
        assert table.changes is not None
        leases = [
            self._limits.default_lease,
            *(hold.lease for hold in self.holds if not hold.detached),
        ]
        if self.recovery:
            leases.append(self._state["longest_lease"])
        generation = self._state["generation"] + 1
        try:
            if generation == 1:
                self._save()  # a journal without a state file would be refused
            self.journal = Journal(self._path, generation)
            self.journal.start(table.changes, table.fence)
            # Until here all is as the last process left it, and from here on it is this one's.
            self._save(
                generation=generation,
                boot=_boot_id(),
                clean=False,
                recovers_until=now + self.recovery,
                longest_lease=math.ceil(max(leases)),
                fence=table.fence + RESERVED,
            )
            self.journal.drop_others()
        except OSError as exc:
            raise self._unusable(exc) from exc
        table.changes.clear()

    def record(self, changes: Iterable[Hold], fence: int) -> None:
        """Write down what a step of the table has changed, before anybody is told.

        Raises:
            OSError: it could not be written. Nothing may be granted then.
        """
        longest = self._state["longest_lease"]
        for hold in changes:
            if hold.span > longest and not hold.detached:
                longest = math.ceil(hold.span)
        if longest > self._state["longest_lease"]:
            # Rarely: twice the time, so that leases which grow little by little cost little.
            self._save(longest_lease=max(longest, min(2 * longest, self._limits.max_lease)))
        self.journal.record(changes, fence)

    def close(self, now: float) -> None:
        """Note that everything is there, even if the machine is stopped next.

        Raises:
            OSError: it is not.
        """
        self.journal.close()
        self._save(clean=True, stopped=now)
        os.close(self._lock)

    def _locked(self) -> int:
        file = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(file)
            if exc.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise StateError(
                f"--state-dir {str(self._path)!r} is in use by another dflockd: give each its own"
            ) from None
        return file

    def _read(self, now: float) -> None:
        self._state = state = self._load()
        self.secret = bytes.fromhex(state["secret"])
        journal = Journal(self._path, state["generation"])
        same_boot = state["boot"] == _boot_id() != ""
        # The kernel has all that was written, unless the machine ended in between.
        is_whole = same_boot or state["clean"]
        is_complete = is_whole and (journal.exists or not state["generation"])
        try:
            restored = journal.read(strict=is_complete)
        except CorruptError as exc:
            raise StateError(
                f"--state-dir: {exc}: delete its journal-* files to go on: the server then waits "
                f"{state['longest_lease']} s for clients to renew what they hold"
            ) from None
        last_now = now if same_boot else state["stopped"]
        if is_complete:
            self.fence = restored.fence
            self.recovery = max(0.0, state["recovers_until"] - last_now)
        else:
            self.fence = max(restored.fence, state["fence"])
            self.recovery = float(state["longest_lease"])
        self.holds = [
            _moved(hold, now - last_now) if is_whole else _doubted(hold, now)
            for hold in restored.holds
        ]

    def _load(self) -> dict[str, Any]:
        path = self._path / "state.json"
        try:
            known = json.loads(path.read_bytes())
            if known["format"] != FORMAT:
                raise StateError(
                    f"{path} is of another version of dflockd (format {known['format']}): "
                    "use that one, or empty the directory once all leases have ended"
                )
            for name, default in _NEW.items():
                if type(known[name]) is not type(default):
                    raise TypeError(f"{name!r} is {type(known[name]).__name__}")
            if len(bytes.fromhex(known["secret"])) != SECRET:
                raise ValueError("'secret' is of another length")
        except FileNotFoundError:
            if any_in(self._path):
                raise StateError(
                    f"--state-dir {str(self._path)!r} has a journal and no state.json: "
                    "bring that back, or empty the directory once all leases have ended"
                ) from None
            return {**_NEW, "secret": secrets.token_hex(SECRET)}
        except (ValueError, KeyError, TypeError) as exc:
            # Not what is wrong with it in detail: a part of the secret could be in that.
            raise StateError(
                f"{path} is damaged ({type(exc).__name__}): bring it back, "
                "or empty the directory once all leases have ended"
            ) from None
        return {name: known[name] for name in _NEW}

    def _save(self, **changes: Any) -> None:
        """Replace the state file, and have it on the disk on return."""
        self._state.update(changes)
        path = self._path / "state.json"
        new = path.with_suffix(".new")
        with open(new, "wb", opener=_private) as file:
            file.write(json.dumps(self._state, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        directory = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _unusable(self, exc: OSError) -> StateError:
        where = f": {exc.filename}" if exc.filename else ""
        return StateError(f"--state-dir {str(self._path)!r}: {exc.strerror or exc}{where}")


def _moved(hold: HoldRecord, by: float) -> HoldRecord:
    """Return a hold with the time that it had left, on a clock that is `by` seconds ahead."""
    return hold._replace(deadline=hold.deadline + by, since=hold.since + by) if by else hold


def _doubted(hold: HoldRecord, now: float) -> HoldRecord:
    """Return a hold that may have been renewed since, or have ended: it gets all of its lease."""
    return hold._replace(deadline=now + hold.lease, since=now)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _boot_id() -> str:
    """Return what tells this boot of the machine from others, or nothing where that is not known.

    A container that was checkpointed and restored has the machine's id, and a clock of its own.
    """
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        return ""
    offsets = _CLOCK_OFFSETS.read_text().split() if _CLOCK_OFFSETS.exists() else []
    return " ".join([boot, *offsets])
