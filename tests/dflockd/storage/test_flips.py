"""Every byte of a directory with twenty locks, changed: refused or harmless, never a second holder."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflockd.storage import journal, records, segment
from dflockd.wire import Acquire, Granted, Space
from tests.dflockd.storage.life import Life, judge
from tests.dflockd.storage.power import Machine

ENDS = ["kill", "stop", "kill and boot", "stop and boot"]


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "SEGMENT", 2048)
        yield patch


class Left:
    """What a process with twenty locks has left."""

    def __init__(self, path: Path, end: str, patch: pytest.MonkeyPatch) -> None:
        self.life = life = Life(path / "run", 1, patch)
        self.path = path / "left"
        life.start()
        for number in range(20):
            key = b"account:%d" % number
            reply = life.ask(Acquire(Space.LOCK, key, 1, 0, 30))
            assert isinstance(reply, Granted)
            life.tell(tokens={**life.told.tokens, key: (reply.token, 30)})
        life.sync()
        life.stop() if end.startswith("stop") else life.kill()
        if end.endswith("boot"):
            life.reboot()
        self.same_boot = not end.endswith("boot")
        machine = Machine()
        for op in life.record.ops:
            machine.do(op)
        self.files = machine.kept()

    def judge(self, name: str, content: bytes) -> str | None:
        files = {**self.files, name: content}
        return judge(self.path, files, self.life.told, same_boot=self.same_boot)


def wrongs(
    left: Left, chance: random.Random, first: int = 0, step: int = 1
) -> tuple[int, int, list[str]]:
    """Change each byte in turn; return how often that was refused, was harmless, and what was wrong."""
    refused, harmless = 0, 0
    wrong = []
    for name, content in left.files.items():
        for position in range(first, len(content), step):
            other = bytes([content[position] ^ chance.randrange(1, 256)])
            found = left.judge(name, content[:position] + other + content[position + 1 :])
            if found is None:
                harmless += 1
            elif found.startswith("refused: "):
                refused += 1
            else:
                wrong.append(f"{name}, byte {position}: {found}")
    return refused, harmless, wrong


def cut(left: Left) -> list[str]:
    """Cut each file to each of some lengths, and return what was wrong."""
    wrong = []
    for name, content in left.files.items():
        for size in {0, 1, 32, 64, 128, 200, len(content) // 2, len(content) - 1}:
            found = left.judge(name, content[:size])
            if found is not None and not found.startswith("refused: "):
                wrong.append(f"{name}, cut to {size}: {found}")
    return wrong


@pytest.mark.parametrize(
    ("end", "first", "step"),
    [
        # Together each byte once.
        *(pytest.param(end, n, len(ENDS), id=end) for n, end in enumerate(ENDS)),
        *(pytest.param(end, 0, 1, id=f"{end}, all", marks=pytest.mark.soak) for end in ENDS),
    ],
)
def test_every_byte(
    tmp_path: Path, end: str, first: int, step: int, patch: pytest.MonkeyPatch
) -> None:
    left = Left(tmp_path, end, patch)
    assert len(left.files) > 1
    refused, harmless, wrong = wrongs(left, random.Random(7), first, step)
    assert not wrong, wrong[:5]
    # What stands behind the end of a segment and in its reserve, and white space, is nothing.
    assert refused * step > 1500
    assert harmless * step < 3000


@pytest.mark.parametrize("end", ENDS)
def test_every_length(tmp_path: Path, end: str, patch: pytest.MonkeyPatch) -> None:
    left = Left(tmp_path, end, patch)
    wrong = cut(left)
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("end", ENDS)
def test_every_file_missing(tmp_path: Path, end: str, patch: pytest.MonkeyPatch) -> None:
    left = Left(tmp_path, end, patch)
    for name in left.files:
        files = {other: content for other, content in left.files.items() if other != name}
        found = judge(left.path, files, left.life.told, same_boot=left.same_boot)
        if found is None:
            # After a power cut the last segment may never have been there.
            assert end == "kill and boot"
        else:
            assert found.startswith("refused: ")


# Without the checks, the same tests find second holders.


def test_without_checksums_a_change_goes_unseen(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    left = Left(tmp_path, "kill", patch)
    original = records.decode

    def decode(data: bytes, start: int, end: int, _seed: int) -> object:
        """As many records as there are, whatever they say."""
        found = []
        while start + 6 < end:
            size = int.from_bytes(data[start + 4 : start + 6], "little")
            body = data[start + 6 : start + 6 + size]
            try:
                found.append(records._read(body))
            except Exception:
                break
            start += 6 + size
        return (found, end) if found else original(data, start, end, _seed)

    patch.setattr(segment, "decode", decode)
    assert wrongs(left, random.Random(7), step=5)[2]


def test_without_its_end_the_length_goes_unseen(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    left = Left(tmp_path, "stop", patch)
    original = segment.parse

    def parse(data: bytes, *args: object) -> object:
        found = original(data, *args)  # type: ignore[arg-type]
        return found and found._replace(end=found.whole, flaw=None)

    patch.setattr("dflockd.storage.reading.segment.parse", parse)
    patch.setattr(
        "dflockd.storage.reading._Check.closed",
        lambda self: [content for content in self._found.values() if content],
    )
    assert cut(left)
