"""What the demo claims, against what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from examples.demo.record import fences_grow, overlaps
from examples.demo.scenes import Burst, Kill, ended

NEXT_HOLDER_MS = 1000.0


@dataclass(frozen=True)
class Check:
    """A row of the final table."""

    scene: str
    what: str
    measured: str
    wanted: str
    holds: bool


def checks(without: Burst, with_locks: Burst, kill: Kill) -> list[Check]:
    return [
        *_without_locks(without),
        *_with_locks(with_locks),
        *_killed(kill),
        _fences(with_locks, kill),
    ]


def _without_locks(burst: Burst) -> list[Check]:
    at_once = len(overlaps(burst.runs))
    lost = burst.sent - burst.balance
    return [
        _all_ran("A", burst),
        Check("A", "overlaps without locks", f"{at_once}", "> 0", at_once > 0),
        Check("A", "deposits lost without locks", f"{lost} of {burst.sent}", "> 0", lost > 0),
    ]


def _with_locks(burst: Burst) -> list[Check]:
    at_once = len(overlaps(burst.runs))
    lost = burst.sent - burst.balance
    return [
        _all_ran("B", burst),
        Check("B", "overlaps with locks", f"{at_once}", "0", at_once == 0),
        Check("B", "deposits lost with locks", f"{lost} of {burst.sent}", "0", lost == 0),
    ]


def _all_ran(scene: str, burst: Burst) -> Check:
    """Each task ran to its end, and none ran twice."""
    done = ended(burst.runs)
    once = len({run.task for run in burst.runs}) == len(burst.runs) == done == burst.sent
    return Check(scene, "tasks run, of tasks sent", f"{done} of {burst.sent}", "all, once", once)


def _killed(kill: Kill) -> list[Check]:
    at_once = len(overlaps(kill.runs))
    after = kill.next_after_ms
    in_time = 0 < after < NEXT_HOLDER_MS
    return [
        Check("C", "overlaps around the kill", f"{at_once}", "0", at_once == 0),
        Check("C", "kill -9 to the next holder", f"{after:.1f} ms", "< 1000 ms", in_time),
    ]


def _fences(burst: Burst, kill: Kill) -> Check:
    grow = fences_grow([*burst.runs, *kill.runs])
    measured = "grow" if grow else "do not grow"
    return Check("B C", "fencing tokens of each account", measured, "grow strictly", grow)
