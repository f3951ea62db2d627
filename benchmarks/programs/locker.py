"""Take and give back locks in one of `benchmarks.turns.WAYS`, as often as it is told.

It prints a line once it is ready. For each line on its input, a JSON list of a way, the address of
the lock server or of Redis, and a number, it takes so many turns, and prints a line.
"""

from __future__ import annotations

import functools
import json
import sys

from benchmarks.turns import WAYS, Turns


@functools.cache
def turns(way: str, address: str) -> Turns:
    return WAYS[way](address)


def main() -> None:
    print(flush=True)
    for line in sys.stdin:
        way, address, number = json.loads(line)
        turns(way, address)(number)
        print(flush=True)


if __name__ == "__main__":
    main()
