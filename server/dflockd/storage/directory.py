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
import logging
import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflockd.files import refuse_irregular
from dflockd.storage import reading, state_file
from dflockd.storage.disk import Disk
from dflockd.storage.journal import Journal
from dflockd.storage.reading import ALL_NAMES, DamagedError, Journaled, Restored, Trust
from dflockd.storage.state_file import OtherFormatError, StateFileError
from dflockd.storage.syncing import Syncing
from dflockd.table import HoldRecord, Limits, LockTable
from dflockd.table.rates import RateRecord, later

RESERVED = 1 << 42
"""Fences that no process gives out in all its life; after a crash the next one starts beyond them.

A process that gave out 100,000 a second would need a year for them. And fences begin with the clock, in
nanoseconds: so many are an hour and a quarter, after which a directory that was emptied is beyond them.
"""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CLOCK_OFFSETS = Path("/proc/self/timens_offsets")

logger = logging.getLogger("dflockd.storage")


class StateError(Exception):
    """The directory cannot be used; the text is one line that says what to do about it."""


class StateDir:
    """The state of one server in one directory, which it has for itself.

    Attributes:
        secret: what the digests of tokens are keyed with.
        fence: the largest fence that may have been given out.
        holds: what was held when it was last used.
        newest: the newest task of each key at that time.
        rates: what had begun by then of keys that have a rate; empty after `start`.
        pauses: which keys were paused.
        rates_since: what may have begun before that is not among them.
        recovery: seconds for which holders must be waited for before anything is granted.

    Args:
        path: the directory; it is made if it is missing, its parent is not.
        now: the time by `clock.now`, which `holds` refer to.
        limits: those of the table that it is for.
        recover: whether to go on with a damaged journal, and wait for holders as after a crash of
            the machine.
        disk: what does the reading and writing.

    Raises:
        StateError: it cannot be used as it is; no lock in it is forgotten.
    """

    def __init__(
        self,
        path: str,
        now: float,
        limits: Limits,
        *,
        recover: bool = False,
        disk: Callable[[Path], Disk] = Disk,
    ) -> None:
        self._path = Path(path)
        self._disk = disk(self._path)
        self._limits = limits
        self._recover = recover
        self._syncing: Syncing | None = None
        self._saving = threading.Lock()
        try:
            self._disk.make()
            self._locks = self._locked()
            try:
                self._read(now)
            except BaseException:
                self.let_go()
                raise
        except OSError as exc:
            raise self._unusable(exc) from exc

    def start(self, table: LockTable, now: float) -> None:
        """Give a new table what was kept, and keep from now on what it holds.

        Raises:
            StateError: nothing can be written.
        """
        table.restore(self.holds, now, self.rates, self.pauses)
        self.rates.clear()  # there can be a million, and the table has them now
        table.remember(self.newest)
        if self.recovery:
            table.recover(now + self.recovery)
        table.doubt_rates(self.rates_since)
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
            self.journal = Journal(self._disk, bytes.fromhex(self._state["identity"]), generation)
            self.journal.start(table.changes, table.fence)
            # Until here all is as the last process left it, and from here on it is this one's.
            self._save(
                generation=generation,
                boot=_boot_id(),
                clean=False,
                segments=[],
                recovers_until=now + self.recovery,
                rates_since=self.rates_since,
                longest_lease=math.ceil(max(leases)),
                fence=table.fence + RESERVED,
            )
            self.journal.lengthen = self._lengthen
            self.journal.longest = self._state["longest_lease"]
            self.journal.drop_others()
        except OSError as exc:
            raise self._unusable(exc) from exc
        table.changes.clear()

    def keep_synced(self, failed: Callable[[Exception], object]) -> None:
        """Bring what is recorded to the disk from now on, in a thread.

        Args:
            failed: called in that thread if the disk does not take it. Nothing may be granted then.
        """

        def told(exc: Exception) -> None:
            try:
                self._distrust(exc)
            finally:
                failed(exc)

        self._syncing = Syncing(self.journal, told)

    def _lengthen(self, lease: float) -> None:
        """Note that a longer lease is about to be recorded than any that may be out.

        Raises:
            OSError: it could not be written. Nothing may be granted then.
        """
        longest = math.ceil(lease)
        # Rarely: twice the time, so that leases which grow little by little cost little.
        self._save(longest_lease=max(longest, min(2 * longest, self._limits.max_lease)))
        self.journal.longest = self._state["longest_lease"]

    def _distrust(self, exc: Exception) -> None:
        """Have the next process take this end for one of the machine, if a sync has failed so.

        The kernel may drop what a disk has not taken, and have the old content after a new mount.
        """
        # Of what was deleted nothing is here. What has its name by now may be another server's.
        if isinstance(exc, OSError) and not isinstance(exc, FileNotFoundError):
            with suppress(OSError):
                self._save(boot="")

    def close(self, now: float) -> None:
        """Note that everything is there, even if the machine is stopped next.

        Raises:
            OSError: it is not.
        """
        if self._syncing is not None:
            self._syncing.stop()
        try:
            segments = self.journal.close()
        except OSError as exc:
            self._distrust(exc)
            raise
        self._save(clean=True, stopped=now, segments=segments)
        self.let_go()

    def let_go(self) -> None:
        """Let another process have the directory, as the end of this one does."""
        for file in self._locks:
            os.close(file)

    def _locked(self) -> list[int]:
        """Return the open files that keep every other process out.

        The directory itself is locked, for anybody may delete a file in it and let the next server in;
        and the file ``lock``, where a file system locks no directories.
        """
        locks: list[int] = []
        try:
            for path, flags in (
                (self._path, os.O_RDONLY | os.O_DIRECTORY),
                (self._path / "lock", os.O_RDWR | os.O_CREAT),
            ):
                refuse_irregular(self._path / "lock")
                locks.append(os.open(path, flags | os.O_CLOEXEC, 0o600))
                try:
                    fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as exc:
                    if exc.errno in (errno.EAGAIN, errno.EACCES):
                        raise StateError(
                            f"--state-dir {str(self._path)!r} is in use by another dflockd: "
                            "give each its own"
                        ) from None
                    if path != self._path:
                        raise
        except BaseException:
            for file in locks:
                os.close(file)
            raise
        return locks

    def _read(self, now: float) -> None:
        self._state = state = self._load()
        self.secret = bytes.fromhex(state["secret"])
        same_boot = state["boot"] == _boot_id() != ""
        trust = Trust.CLOSED if state["clean"] else Trust.KEPT if same_boot else Trust.CUT
        try:
            restored = self._journal(trust)
        except OtherFormatError as exc:
            raise self._other_version(exc) from None
        except DamagedError as exc:
            if not self._recover:
                raise StateError(
                    f"--state-dir: {exc}: start once with --state-recover, to wait "
                    f"{state['longest_lease']} s for clients to renew what they hold; or empty the "
                    "directory if nothing is held any more"
                ) from None
            logger.warning("--state-recover: continuing although %s", exc)
            trust = Trust.NONE
            restored = self._journal(trust)
        self.newest = restored.newest
        last_now = now if same_boot else state["stopped"]
        if trust in (Trust.CLOSED, Trust.KEPT):
            self.fence = restored.fence
            self.recovery = max(0.0, state["recovers_until"] - last_now)
            self.holds = [_moved(hold, now - last_now) for hold in restored.holds]
            self.rates = [later(rate, now - last_now) for rate in restored.rates]
            self.rates_since = state["rates_since"] + now - last_now
            self.pauses = [
                pause._replace(
                    since=pause.since + now - last_now, until=pause.until + now - last_now
                )
                for pause in restored.pauses
            ]
        else:
            self.fence = max(restored.fence, state["fence"])
            self.recovery = float(state["longest_lease"])
            self.holds = [_doubted(hold, now) for hold in restored.holds]
            self.rates = [
                rate._replace(begun=()) for rate in restored.rates if isinstance(rate, RateRecord)
            ]
            # Until then holders may come back whose runs were granted before, and begin.
            self.rates_since = now + self.recovery
            # Like a lease: how much of it was over nobody knows.
            self.pauses = [pause.at(now) for pause in restored.pauses]

    def _journal(self, trust: Trust) -> Restored:
        """Return what the journal says that counts.

        Raises:
            DamagedError: it is not as it was left.
            OSError: it cannot be read.
        """
        state = self._state
        if not state["generation"]:
            return Restored([], 0)
        identity = bytes.fromhex(state["identity"])
        journal = Journaled(identity, state["generation"], state["segments"])
        return reading.read(self._disk, journal, trust)

    def _load(self) -> dict[str, Any]:
        path = self._path / state_file.NAME
        try:
            return state_file.load(self._disk.read(state_file.NAME))
        except FileNotFoundError:
            if self._disk.names(ALL_NAMES):
                raise StateError(
                    f"--state-dir {str(self._path)!r} has a journal and no {state_file.NAME}: "
                    "bring that back, or empty the directory once all leases have ended"
                ) from None
            return state_file.new()
        except OtherFormatError as exc:
            raise self._other_version(exc) from None
        except StateFileError as exc:
            raise StateError(
                f"{path} is damaged ({exc}): bring it back, "
                "or empty the directory once all leases have ended"
            ) from None

    def _save(self, **changes: Any) -> None:
        """Replace the state file, and have it on the disk on return."""
        with self._saving:  # the thread that syncs may have something to note, too
            state = {**self._state, **changes, "format": state_file.FORMAT}
            self._disk.replace(state_file.NAME, state_file.dump(state))
            self._state = state

    def _other_version(self, exc: OtherFormatError) -> StateError:
        # Not a matter of --state-recover: what cannot be read may be what a lock depends on.
        return StateError(
            f"--state-dir {str(self._path)!r} is of another version of dflockd ({exc}): "
            "use that one, or empty the directory once all leases have ended"
        )

    def _unusable(self, exc: OSError) -> StateError:
        where = f": {exc.filename}" if exc.filename else ""
        return StateError(f"--state-dir {str(self._path)!r}: {exc.strerror or exc}{where}")


def _moved(hold: HoldRecord, by: float) -> HoldRecord:
    """Return a hold with the time that it had left, on a clock that is `by` seconds ahead."""
    return hold._replace(deadline=hold.deadline + by, since=hold.since + by) if by else hold


def _doubted(hold: HoldRecord, now: float) -> HoldRecord:
    """Return a hold that may have been renewed since, or have ended: it gets all of its lease."""
    return hold._replace(deadline=now + hold.lease, since=now)


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
