"""The command ``dflockd cluster``: shows the shards of a cluster, and moves them."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeAlias

from dflockd import clock
from dflockd.errors import InvalidArgumentError, RemoteError
from dflockd.shards import (
    NUM_SHARDS,
    Cluster,
    Get,
    ShardConflictError,
    ShardMapping,
    Store,
    get_shard_id,
)
from dflockd.shards.conditions import Condition, condition_of, count_conditions
from dflockd.shards.keys import SERVERS_MARK, Keys
from dflockd.shards.liveness import Roster
from dflockd.wire import key_problem

MOVE_TIMEOUT = 60.0
"""Seconds that a move is waited for."""

POLL = 0.2
"""Seconds between two looks at a move."""

_CONDITIONS = {
    Condition.SERVED: "served",
    Condition.RECOVERING: "recovering",
    Condition.MOVING: "moving",
    Condition.GONE: "of servers that are gone",
    Condition.UNASSIGNED: "without a server",
}

AsyncCommand: TypeAlias = Callable[[Cluster, argparse.Namespace], Awaitable[None]]


class UsageError(ValueError):
    """The arguments are wrong; the text is one line."""


class CommandError(Exception):
    """It was not done, or not all of it; the text is one line."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments of ``dflockd cluster``, those after ``cluster``.

    Raises:
        UsageError: they are wrong.
    """
    parser = _ClusterParser(prog="dflockd cluster", description=__doc__, allow_abbrev=False)
    _add_settings(parser)
    # Before the command and behind it: what is not said there leaves alone what was said before.
    settings = _ClusterParser(
        add_help=False, argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    _add_settings(settings)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: AsyncCommand, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=text, description=text, parents=[settings], allow_abbrev=False
        )
        added.set_defaults(command=command, shards=[])
        return added

    status = add("status", _status, "Show the servers and how many shards each has")
    status.add_argument("--json", action="store_true", help="print JSON, one entry per shard")
    rebalance = add("rebalance", _rebalance, "Spread the shards evenly over all servers")
    rebalance.add_argument(
        "--threshold",
        type=_share,
        default=0.0,
        help="do nothing if the servers differ by no more than this share of the mean (default 0)",
    )
    for name, command, text in (
        ("pin", _pin, "Pin shards to their servers, so that rebalancing leaves them there"),
        ("unpin", _pin, "Unpin shards, so that rebalancing can move them"),
        ("move", _move, "Move shards to another server"),
    ):
        added = add(name, command, text)
        added.set_defaults(name=name)
        added.add_argument(
            "shards", metavar="SHARD", nargs="+", help="7, 0-99, or key:NAME for the shard of a key"
        )
        if name == "move":
            added.add_argument("--to", metavar="HOST:PORT", required=True, help="the server")
    parsed = parser.parse_args(arguments)
    parsed.shards = _shards(parsed.shards)
    return parsed


def _add_settings(parser: argparse.ArgumentParser) -> None:
    for name, metavar, text in (
        ("", "URL", "etcd://host:2379[,...]"),
        ("prefix", "TEXT", "prefix of its keys"),
        ("ca", "FILE", "certificate authorities of etcd (PEM)"),
        ("cert", "FILE", "client certificate for etcd (PEM)"),
        ("key", "FILE", "private key of that certificate (PEM)"),
        ("user", "NAME", "user name for an etcd with users"),
        ("password-file", "FILE", "file that contains the user's password in one line"),
    ):
        flag = f"--cluster-{name}".rstrip("-")
        variable = f"DFLOCKD{flag[1:].upper().replace('-', '_')}"
        parser.add_argument(flag, metavar=metavar, help=f"{text} [{variable}]")


async def run(store: Store, prefix: str, parsed: argparse.Namespace) -> None:
    """Carry out a command that was parsed.

    Raises:
        CommandError: it was not done, or not all of it.
    """
    try:
        parsed.closed = await _check_founded(store, prefix)
        cluster = Cluster(store, "dflockd-cluster-command", prefix=prefix, mark=SERVERS_MARK)
        await parsed.command(cluster, parsed)
    except ShardConflictError as exc:
        raise CommandError(
            f"{len(exc.shards)} shards were changed by somebody else meanwhile: run it again"
        ) from exc
    except (RemoteError, InvalidArgumentError) as exc:
        raise CommandError(str(exc)) from exc
    finally:
        await store.close()


async def _check_founded(store: Store, prefix: str) -> str:
    """Return who says that etcd was wiped or restored, if somebody does."""
    meta, closed = Keys(prefix).meta, Keys(prefix).closed
    found = (await store.txn([], [Get(meta), Get(closed)])).records
    if meta not in found:
        raise CommandError(
            f"--cluster-prefix {prefix}: there is no cluster, for {meta} is not in etcd: no server "
            "was started with that prefix, or --cluster is another etcd"
        )
    return found[closed].value.decode(errors="replace") if closed in found else ""


async def _status(cluster: Cluster, parsed: argparse.Namespace) -> None:
    roster, mapping = await cluster.get_roster(), await cluster.mapper.load_shard_mapping()
    now = time.time()
    if parsed.json:
        print(json.dumps(_document(mapping, roster, now)))
        return
    for line in (*_table(mapping, roster, now), *_summary(mapping, roster, now)):
        print(line)
    if parsed.closed:
        print(
            f"etcd was wiped, or restored from a backup, says {parsed.closed}: servers that were there "
            "before end, and others open no shard yet of which nothing is known"
        )


def _table(mapping: ShardMapping, roster: Roster, now: float) -> Iterator[str]:
    """Yield a line for each server."""
    having = Counter(record.current for record in mapping.records if record.current)
    recovering = Counter(r.current for r in mapping.records if r.recovers > now)
    targets = mapping.counts()
    rows = [("server", "serves", "is to serve", "")]
    for name in sorted({*roster.nodes, *having, *targets}):
        is_alive = name in roster.nodes
        notes = ["leader"] * (name == roster.leader) + ["leaving"] * (name in roster.leavers)
        if is_alive and recovering[name]:
            notes.append(f"{recovering[name]} recover")
        if not is_alive:
            notes.append(f"gone, had {having[name]}" if having[name] else "gone")
        serves = having[name] if is_alive else 0
        rows.append((name, str(serves), str(targets[name]), ", ".join(notes)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for server, serves_, is_to, notes_ in rows:
        line = f"{server:<{widths[0]}}  {serves_:>{widths[1]}}  {is_to:>{widths[2]}}  {notes_}"
        yield line.rstrip()


def _summary(mapping: ShardMapping, roster: Roster, now: float) -> Iterator[str]:
    counts = count_conditions(mapping.records, roster.nodes, now)
    texts = (f"{counts[condition]} {text}" for condition, text in _CONDITIONS.items())
    pinned = sum(record.pinned for record in mapping.records)
    yield f"{mapping.num_shards} shards: {', '.join(texts)}; {pinned} pinned"
    if counts[Condition.RECOVERING]:
        left = max(r.recovers for r in mapping.records if r.current in roster.nodes) - now
        yield (
            f"those that recover grant nothing for up to {math.ceil(left)} s: their last server ended "
            "without handing them over, and its holders renew meanwhile"
        )
    if stranded := mapping.stranded(roster.nodes):
        yield (
            f"{len(stranded)} shards are pinned to servers that are gone, the first of them "
            f"{stranded[0]}: start those servers, or unpin or move the shards"
        )
    if not roster.nodes:
        yield "no server is alive: locks are neither granted nor renewed"
    for name in sorted(roster.strangers):
        yield f"the entry of {name} was not written by a server, and is ignored: delete it"


def _document(mapping: ShardMapping, roster: Roster, now: float) -> Mapping[str, object]:
    counts = count_conditions(mapping.records, roster.nodes, now)
    having = {record.current for record in mapping.records if record.current}
    return {
        "servers": sorted(roster.nodes),
        "leader": roster.leader,
        "leaving": sorted(roster.leavers),
        "gone": sorted({*having, *mapping.counts()} - roster.nodes.keys()),
        "counts": {condition.value: count for condition, count in counts.items()},
        "shards": [
            {
                "target": record.target,
                "current": record.current,
                "epoch": record.epoch,
                "pinned": record.pinned,
                "state": condition_of(record, roster.nodes, now).value,
            }
            for record in mapping.records
        ],
    }


async def _rebalance(cluster: Cluster, parsed: argparse.Namespace) -> None:
    started = clock.now()
    if not await cluster.get_candidates():
        raise CommandError("no server is alive that shards could be moved to")
    await _refuse_recovering(cluster, range(NUM_SHARDS))
    moved = await cluster.rebalance_shard_mapping(threshold=parsed.threshold)
    await _moved(cluster, moved, started)


async def _move(cluster: Cluster, parsed: argparse.Namespace) -> None:
    started = clock.now()
    await _refuse_recovering(cluster, parsed.shards)
    moved = await cluster.move_shards(parsed.shards, parsed.to)
    await _moved(cluster, moved, started)


async def _pin(cluster: Cluster, parsed: argparse.Namespace) -> None:
    mapping = await cluster.mapper.load_shard_mapping()
    shards, pins = sorted(set(parsed.shards)), parsed.name == "pin"
    if pins and (without := [shard for shard in shards if not mapping[shard].target]):
        raise CommandError(
            f"{len(without)} of these shards have no server to be pinned to, the first of them "
            f"{without[0]}: see dflockd cluster status"
        )
    for shard in shards:
        mapping = mapping.pin(shard) if pins else mapping.unpin(shard)
    await cluster.mapper.store_shard_mapping(mapping)
    same = len(shards) - len(mapping.unsaved)
    left = f"; {same} {'were already' if pins else 'were not'}" if same else ""
    print(f"{len(mapping.unsaved)} shards {parsed.name}ned{left}")


async def _refuse_recovering(cluster: Cluster, shards: Iterable[int]) -> None:
    """Refuse to move what cannot be handed over."""
    mapping, now = await cluster.mapper.load_shard_mapping(), time.time()
    if recovering := {shard for shard in shards if mapping[shard].recovers > now}:
        left = max(mapping[shard].recovers for shard in recovering) - now
        raise CommandError(
            f"{len(recovering)} of these shards recover for up to {math.ceil(left)} s, the first of "
            f"them {min(recovering)}: moved before that, their next server would wait for holders anew"
        )


async def _moved(cluster: Cluster, moved: int, started: float) -> None:
    """Wait until every shard is where it should be, and say how they got there."""
    while clock.now() < started + MOVE_TIMEOUT:
        nodes = set(await cluster.get_nodes())
        mapping = await cluster.mapper.load_shard_mapping()
        left = sum(r.current != r.target and r.target in nodes for r in mapping.records)
        if not left:
            recovering = sum(record.recovers > time.time() for record in mapping.records)
            note = f"; {recovering} recover: they were not handed over" if recovering else ""
            print(f"{moved} shards moved in {clock.now() - started:.1f} s{note}")
            return
        await asyncio.sleep(POLL)
    raise CommandError(
        f"{left} shards are not yet where they should be, after {MOVE_TIMEOUT:g} s: "
        "see dflockd cluster status"
    )


def _shards(texts: Sequence[str]) -> list[int]:
    shards: list[int] = []
    for text in texts:
        if text.startswith("key:"):
            key = os.fsencode(text.removeprefix("key:"))
            if problem := key_problem(key):
                raise UsageError(f"shard {text!r}: the key {problem}, so that no lock has it")
            shards.append(get_shard_id(key))
            continue
        found = re.fullmatch("([0-9]+)(?:-([0-9]+))?", text)
        if found is None:
            raise UsageError(f"shard {text!r} is malformed: write 7, 0-99 or key:NAME")
        # As text first: there is no end to the digits that can be written.
        if any(len(number.lstrip("0")) > len(str(NUM_SHARDS)) for number in found.groups("0")):
            raise UsageError(f"shard {text!r} does not exist: they are 0 to {NUM_SHARDS - 1}")
        first, last = int(found[1]), int(found[2] or found[1])
        if last >= NUM_SHARDS or first >= NUM_SHARDS:
            raise UsageError(f"shard {text!r} does not exist: they are 0 to {NUM_SHARDS - 1}")
        if first > last:
            raise UsageError(f"shard {text!r} is an empty range: write {last}-{first}")
        shards += range(first, last + 1)
    return shards


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1
    if not 0 <= share < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of the mean, such as 0.2")
    return share


class _ClusterParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help tells more)")
