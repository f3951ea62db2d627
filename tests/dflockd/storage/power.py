"""What a power cut can leave of what a server has written: all that happened is known, so that every
state of the disk that could follow can be made and judged.

In the manner of ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014): the run is
recorded as it goes to the operating system, with every write, sync, rename and deletion. Until it is
synced, each block of a file may be on the disk in any version that it ever had, whole or torn between
two of them, a file may have any size that it had, and of the changes of names any may be missing.
"""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflockd.storage.disk import Disk, Mapped

BLOCK = 1024
"""Bytes that reach the disk together, at best."""

SECTOR = 512
"""Bytes that are never torn."""


@dataclass(frozen=True)
class Op:
    """One thing that was asked of the operating system, or a note of what was promised by then."""

    kind: str
    file: int = 0
    name: str = ""
    new: str = ""
    position: int = 0
    data: bytes = b""
    size: int = 0
    note: Any = None


@dataclass
class Record:
    """All that the processes on one directory have done, one after the other."""

    ops: list[Op] = field(default_factory=list)
    files: int = 0

    def note(self, note: Any) -> None:
        """Say what somebody was told."""
        self.ops.append(Op("note", note=note))


class _Bytes:
    """A file in memory that tells what is copied into it."""

    def __init__(self, disk: RecordingDisk, file: int, mapped: Mapped) -> None:
        self._disk, self._file, self._mapped = disk, file, mapped

    def __getitem__(self, where: slice) -> bytes:
        return self._mapped.data[where]

    def __setitem__(self, where: slice, data: bytes) -> None:
        self._mapped.data[where] = data
        self._disk.wrote(self._file, where.start or 0, data)


class _Words(_Bytes):
    def __setitem__(self, where: int, value: int) -> None:  # type: ignore[override]
        self._mapped.words[where] = value
        self._disk.wrote(self._file, where * 8, value.to_bytes(8, "little"))


class _Recorded:
    def __init__(self, disk: RecordingDisk, file: int, mapped: Mapped) -> None:
        self.data, self.words = _Bytes(disk, file, mapped), _Words(disk, file, mapped)
        self._mapped = mapped

    def close(self) -> None:
        self._mapped.close()


class RecordingDisk(Disk):
    """A disk that does what it is asked, and records it. It need not wait for the real one."""

    def __init__(self, path: Path, record: Record) -> None:
        super().__init__(path)
        self.record = record
        self._ids: dict[int, int] = {}

    def make(self) -> None:
        self.path.mkdir(exist_ok=True)

    def wrote(self, file: int, position: int, data: bytes) -> None:
        self.record.ops.append(
            Op("write", file=self._ids[file], position=position, data=bytes(data))
        )

    def create(self, name: str, size: int) -> int:
        file = super().create(name, size)
        self.record.files += 1
        self._ids[file] = self.record.files
        self.record.ops.append(Op("create", file=self.record.files, name=name, size=size))
        return file

    def map(self, file: int, size: int) -> Any:
        return _Recorded(self, file, super().map(file, size))

    def write(self, file: int, data: bytes, position: int) -> None:
        super().write(file, data, position)
        self.wrote(file, position, data)

    def sync(self, file: int) -> None:
        self.record.ops.append(Op("sync", file=self._ids[file]))

    def sync_names(self) -> None:
        self.record.ops.append(Op("names"))

    def rename(self, name: str, new: str) -> None:
        super().rename(name, new)
        self.record.ops.append(Op("rename", name=name, new=new))

    def unlink(self, names: Iterable[str]) -> None:
        for name in names:
            if (self.path / name).exists():
                super().unlink([name])
                self.record.ops.append(Op("unlink", name=name))


class Left(Disk):
    """A directory as something left it, in memory: for reading alone."""

    def __init__(self, path: Path, files: dict[str, bytes]) -> None:
        super().__init__(path)
        self._files = files

    def make(self) -> None:
        """Make the directory; nothing in it is to outlive a power cut."""
        self.path.mkdir(exist_ok=True)

    def names(self, pattern: str) -> list[str]:
        return sorted(fnmatch.filter(self._files, pattern))

    def read(self, name: str) -> bytes:
        try:
            return self._files[name]
        except KeyError:
            raise FileNotFoundError(name) from None

    def create(self, name: str, size: int) -> int:
        raise AssertionError(f"{name}: nothing is written before all is read")


class File:
    """What is on the disk of a file, and what may be."""

    def __init__(self, size: int) -> None:
        self.sizes = {0, size}
        """All that it may have."""
        self.synced = False
        self.content = bytearray(size)
        self.versions: dict[int, list[bytes]] = {}
        """By block, what it may hold, oldest first; of a block that is not here, `content` is known."""

    def write(self, position: int, data: bytes) -> None:
        end = position + len(data)
        if end > len(self.content):
            # Every size on the way.
            self.sizes |= set(range(len(self.content), end, max(1, len(data) // 3))) | {end}
            self.content.extend(bytes(end - len(self.content)))
        blocks = range(position // BLOCK, (end - 1) // BLOCK + 1)
        for block in blocks:
            self.versions.setdefault(block, [self.block(block)])
        self.content[position:end] = data
        for block in blocks:
            self.versions[block].append(self.block(block))

    def block(self, number: int) -> bytes:
        return bytes(self.content[number * BLOCK : (number + 1) * BLOCK])

    def sync(self) -> None:
        self.sizes = {len(self.content)}
        self.versions.clear()

    def latest(self) -> bytes:
        return bytes(self.content)

    def oldest(self) -> bytes:
        return self.mixed(lambda versions: versions[0], min(self.sizes))

    def mixed(self, choose: Any, size: int) -> bytes:
        data = bytearray(self.content)
        for block, versions in self.versions.items():
            start = block * BLOCK
            chosen = choose(versions)
            data[start : start + BLOCK] = chosen.ljust(len(versions[-1]), b"\0")
        return bytes(data[:size]).ljust(size, b"\0")


def torn(versions: list[bytes], chance: random.Random) -> bytes:
    """Return a block of which some sectors are of one version and some of another."""
    length = len(versions[-1])
    sectors = [
        chance.choice(versions).ljust(length, b"\0")[start : start + SECTOR]
        for start in range(0, length, SECTOR)
    ]
    return b"".join(sectors)


class Machine:
    """The disk as the operations go on."""

    def __init__(self) -> None:
        self.files: dict[int, File] = {}
        self.names: dict[str, int] = {}
        """As they are on the disk for certain."""
        self.pending: list[Op] = []
        """Changes of names that are not."""

    def do(self, op: Op) -> None:
        if op.kind == "create":
            self.files[op.file] = File(op.size)
            self.pending.append(op)
        elif op.kind == "write":
            self.files[op.file].write(op.position, op.data)
        elif op.kind == "sync":
            self.files[op.file].sync()
        elif op.kind == "names":
            self.names = self.named(self.pending)
            self.pending = []
        elif op.kind in ("rename", "unlink"):
            self.pending.append(op)

    def named(self, ops: Iterable[Op]) -> dict[str, int]:
        names = dict(self.names)
        for op in ops:
            if op.kind == "create":
                names[op.name] = op.file
            elif op.kind == "unlink":
                names.pop(op.name, None)
            elif op.name in names:
                names[op.new] = names.pop(op.name)
        return names

    def kept(self) -> dict[str, bytes]:
        """Return what is there if nothing is lost: after the end of a process."""
        return {name: self.files[file].latest() for name, file in self.named(self.pending).items()}

    def states(self, chance: random.Random, most: int) -> Iterator[dict[str, bytes]]:
        """Return what may be there after a power cut: the extremes first, then by chance."""

        def latest(file: File) -> bytes:
            return file.latest()

        def oldest(file: File) -> bytes:
            return file.oldest()

        def first_block(file: File) -> bytes:
            return file.mixed(
                lambda versions: versions[-1 if versions is file.versions.get(0) else 0],
                len(file.content),
            )

        def others(file: File) -> bytes:
            return file.mixed(
                lambda versions: versions[0 if versions is file.versions.get(0) else -1],
                len(file.content),
            )

        def mixed(file: File) -> bytes:
            return file.mixed(chance.choice, chance.choice(sorted(file.sizes)))

        def mixed_and_torn(file: File) -> bytes:
            return file.mixed(
                lambda versions: torn(versions, chance), chance.choice(sorted(file.sizes))
            )

        prefixes = [self.pending[:count] for count in range(len(self.pending) + 1)]
        choices = [
            (prefixes[0], latest),
            (prefixes[-1], oldest),
            (prefixes[-1], latest),
            (prefixes[0], oldest),
            (prefixes[-1], first_block),
            (prefixes[-1], others),
        ]
        while len(choices) < most:
            ops = chance.choice(
                [chance.choice(prefixes), [op for op in self.pending if chance.random() < 0.5]]
            )
            choices.append((ops, chance.choice([mixed, mixed_and_torn])))
        seen = set()
        for ops, content in choices[:most]:
            names = self.named(ops)
            state = {name: content(self.files[file]) for name, file in names.items()}
            key = tuple(sorted(state.items()))
            if key not in seen:
                seen.add(key)
                yield state
