"""Several real beats, and what they have sent."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from dflockd import admin
from examples.demo.stage import LockServer, Process, wait_until
from tests.celery_dflock.beat import scheduled

PATIENCE = 60.0
KEY = "celery-beat:scheduled"
APP = "tests.celery_dflock.beat.scheduled"
LEADS = "beat: leading now"
STANDS_BY = "beat: standing by, "

T = TypeVar("T")
Event = dict[str, Any]


class Beat(Process):
    """`celery beat -S dflock`, with a schedule file of its own."""

    def __init__(self, directory: Path, name: str, env: dict[str, str], *args: str) -> None:
        super().__init__(directory, name, env)
        self._args = args

    def _command(self) -> Sequence[str]:
        celery = (sys.executable, "-m", "celery", "-A", APP)
        files = ("--schedule", str(self.directory / f"{self.name}.schedule"), "--pidfile=")
        return [*celery, *("beat", "-S", "dflock", *files, "--loglevel", "INFO"), *self._args]

    def logged(self, text: str) -> list[float]:
        """The wall times of the lines with this text, over all starts."""
        pattern = re.compile(r"\[(\d+-\d+-\d+ \d+:\d+:\d+,\d+): .*" + re.escape(text))
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        found = (pattern.match(line) for line in lines)
        return [
            datetime.strptime(each[1], "%Y-%m-%d %H:%M:%S,%f").timestamp() for each in found if each
        ]


class Fleet:
    """Some beats of one app, on one lock server."""

    def __init__(
        self,
        directory: Path,
        redis_url: str,
        server: LockServer,
        *,
        size: int = 3,
        addresses: Sequence[str] = (),
        ttl: int = 3,
        prefix: str = "",
        **env: str,
    ) -> None:
        self.server = server
        self.key = prefix + KEY
        self.record = directory / "beats.jsonl"
        common = {
            "TZ": "UTC",
            scheduled.BROKER: redis_url,
            scheduled.RECORD: str(self.record),
            scheduled.LOCK_TTL: str(ttl),
            scheduled.PREFIX: prefix,
            # Of its own: workers of other tests are at the same broker, and know not its tasks.
            scheduled.QUEUE: directory.name,
            **env,
        }
        addresses = addresses or [server.address] * size
        self.env = {**common, "DFLOCK_SERVERS": server.address}
        self.beats = [
            Beat(directory, f"beat-{n}", {**common, "DFLOCK_SERVERS": address})
            for n, address in enumerate(addresses)
        ]
        self._running = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            for beat in self.beats:
                starting.enter_context(beat)
            for beat in self.beats:
                self.wait_ready(beat)
            self._running = starting.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def wait_ready(self, beat: Beat) -> None:
        """Wait until it leads or stands by."""

        def probe() -> bool | None:
            text = beat.log_text()
            return (LEADS in text or STANDS_BY in text) or None

        wait_until(probe, PATIENCE, lambda: beat.with_log(f"{beat.name} is not ready"))

    def restart(self, beat: Beat) -> None:
        beat.start()
        self.wait_ready(beat)

    # Who leads.

    def leader(self) -> Beat | None:
        """Who holds the lock, as the lock server says."""
        holders = admin.inspect(self.server.address, self.key)["holders"]
        pids = [int(holder["label"].rpartition(" ")[2]) for holder in holders]
        return next((beat for beat in self.beats if beat.running and beat.pid in pids), None)

    def wait_leader(self, but: Beat | None = None) -> Beat:
        def probe() -> Beat | None:
            leader = self.leader()
            return None if leader is but else leader

        return self.wait(probe, "a leader")

    def suspend_idle_leader(self) -> Beat:
        """Stop the leader (SIGSTOP) where it idles between two firings, and all is written down.

        Whatever happens to it elsewhere may double a message.
        """

        def probe() -> Beat | None:
            leader = self.wait_leader()
            os.kill(leader.pid, signal.SIGSTOP)
            process = psutil.Process(leader.pid)
            self.wait(lambda: process.status() == psutil.STATUS_STOPPED or None, "it to stop")
            now = time.monotonic()
            idles = [e for e in self.events("idles") if e["pid"] == leader.pid]
            if idles and now < idles[-1]["at"] + idles[-1]["seconds"]:
                return leader
            os.kill(leader.pid, signal.SIGCONT)
            return None

        return self.wait(probe, "a leader that idles")

    def term_of(self, beat: Beat, after: float) -> float:
        """The wall time at which a beat began to lead, after another time."""

        def probe() -> float | None:
            return next((at for at in beat.logged(LEADS) if at >= after - 0.001), None)

        return self.wait(probe, f"{beat.name} to lead")

    def fail_over(self, end: Callable[[Beat], object]) -> tuple[Beat, float]:
        """End the leader; return who leads now, and the seconds until it could send."""
        old = self.wait_leader()
        ended = time.time()
        end(old)
        new = self.wait_leader(but=old)
        return new, self.term_of(new, ended) - ended

    # What was sent.

    def events(self, what: str, **wanted: Any) -> list[Event]:
        try:
            lines = self.record.read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        wanted["what"] = what
        return [e for e in events if all(e.get(name) == value for name, value in wanted.items())]

    def sent(self, after: float = 0.0, task: str = "second") -> list[Event]:
        """What was sent after a monotonic time."""
        return [e for e in self.events("sent", task=task) if e["at"] > after]

    def wait_sent(self, number: int, after: float | None = None, by: Beat | None = None) -> None:
        """Wait until so many have been sent, from now on."""
        start = time.monotonic() if after is None else after

        def probe() -> bool | None:
            sent = [e for e in self.sent(start) if by is None or e["pid"] == by.pid]
            return len(sent) >= number or None

        self.wait(probe, f"{number} firings")

    def idled(self, since: float, until: float) -> float:
        """For how many of these monotonic seconds a leader has slept because it meant to.

        Nothing was due then, as it saw it. The rest of the time it was at work or was kept from it by
        the machine, or nobody led.
        """
        seconds, end = 0.0, since
        for event in sorted(self.events("idles"), key=itemgetter("at")):
            begin = max(end, event["at"])
            end = max(end, min(event["at"] + event["seconds"], until))
            seconds += max(0.0, end - begin)
        return seconds

    def assert_none_missed(self, sent: Sequence[Event]) -> None:
        """No leader slept while a firing was due that nobody had sent: their interval is a second.

        One that the machine has kept from its work for longer sends the latest of them alone.
        """
        for one, other in pairwise(sent):
            idle = self.idled(one["at"], other["at"])
            assert idle < 1.5, f"{idle:.3f} s between {one} and {other}"

    def assert_each_once(self, sent: Sequence[Event]) -> None:
        """Every due time from the first to the last was sent, and once."""
        dues = [datetime.fromisoformat(event["due"]).timestamp() for event in sent]
        gaps = [after - before for before, after in pairwise(dues)]
        assert gaps, "two firings at least"
        assert all(gap > 0.5 and abs(gap - round(gap)) < 1e-3 for gap in gaps), gaps
        assert len({event["id"] for event in sent}) == len(sent)
        self.assert_none_missed(sent)

    def wait(self, probe: Callable[[], T | None], what: str, seconds: float = PATIENCE) -> T:
        def failure() -> str:
            logs = "\n\n".join(beat.with_log(beat.name) for beat in self.beats)
            return f"waited {seconds:g} s for {what}\n{logs}"

        return wait_until(probe, seconds, failure)


def assert_never_early(sent: Sequence[Event]) -> None:
    for event in sent:
        assert event["wall"] >= datetime.fromisoformat(event["due"]).timestamp(), event
