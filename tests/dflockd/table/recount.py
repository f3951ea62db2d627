"""All that a table counts, counted anew from what is in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from dflockd.table import Entry, Hold, LockTable, Partition, Waiter
from dflockd.table.deadlines import Timed
from dflockd.table.grouped import GroupedQueue, Lane, Ring
from dflockd.table.line import ClientProcess, Line, Lines, WaiterRow
from dflockd.table.owners import _rank
from dflockd.table.queue import Queue
from dflockd.table.rates import KeyRate, packed_size
from dflockd.table.state import NOBODY
from dflockd.table.states import EXPECTED, PASSED, QUEUED, RESERVED, UNTOLD, WAITING


def check_counts(table: LockTable) -> None:
    """See that every count of a table is what there is, between two steps."""
    slots, counts = table.slots, table.counts
    partitions = list(table.each_partition())
    entries = [each for part in partitions for space in part.spaces for each in space.values()]
    holds = [hold for entry in entries for hold in entry.holds.values()]
    queued = [waiter for entry in entries for waiter in entry.waiters or ()]
    reserved = [waiter for part in partitions for waiter in part.reserved.values()]
    away = [waiter for waiter in reserved if waiter.is_away]
    waiters = list(dict.fromkeys([*queued, *reserved]))
    assert slots.size == len(entries)
    assert slots.paused == sum(entry.pause is not None for entry in entries)
    assert all(slots.is_here(entry) for entry in slots.withheld)
    assert len(slots.reservations) == len(away)
    assert counts.holding == len(holds)
    assert counts.waiting == len(waiters)
    newest = [each for part in partitions for each in part.newest.values()]
    assert set(slots.newest._order) == set(newest)
    rates = [rate for part in partitions for rate in part.rates.open.values()]
    pauses = [entry.pause for entry in entries if entry.pause is not None]
    packed = {pack for part in partitions for pack in part.rates.packed.values()}
    _check_deadlines(table, [*holds, *waiters, *rates, *packed, *pauses])
    for partition in partitions:
        _check_partition(partition)
    for entry in entries:
        _check_entry(entry)
    _check_rates(table, partitions)
    _check_peers(table, holds, waiters)


def _check_deadlines(table: LockTable, there: Iterable[Timed]) -> None:
    timed = {item for item in there if _is_set(item)}
    chained = []
    for chain in table.deadlines._chains.values():
        before, item = None, chain.first
        while item is not None:
            assert item.chain is chain
            assert item.before is before
            chained.append(item)
            before, item = item, item.after
        assert chain.last is before
    assert len(chained) == len(timed)
    assert set(chained) == timed


def _check_partition(partition: Partition) -> None:
    for ticket, waiter in partition.reserved.items():
        assert waiter.ticket == ticket
        assert waiter.entry.partition is partition
        assert waiter.is_away or waiter.turn is not None
        assert waiter.state in (QUEUED, WAITING, RESERVED, EXPECTED, PASSED)
        assert waiter.is_away == _is_set(waiter) or waiter.state in (WAITING, EXPECTED)
    assert all(not hold.ended for hold in partition.doubted)


def _check_entry(entry: Entry) -> None:
    assert entry.is_used
    queue, holds = entry.waiters, entry.holds
    assert all(hold.fence == fence and hold.entry is entry for fence, hold in holds.items())
    assert entry.used == sum(hold.weight for hold in holds.values())
    there: list[Hold | Waiter] = [*holds.values(), *(queue or ())]
    of_owners = [(owner, item) for owner, each in (entry.owners or {}).items() for item in each]
    assert all(item.owner is not None and item.owner.id == owner for owner, item in of_owners)
    assert len(of_owners) == len({item for _, item in of_owners})
    assert {item for _, item in of_owners} == {item for item in there if item.owner is not None}
    for each in (entry.owners or {}).values():
        assert each == sorted(each, key=_rank) != []
    waiters = [item for item in there if isinstance(item, Waiter)]
    assert set(entry.aged or ()) == {waiter for waiter in waiters if waiter.age}
    for waiter in waiters:
        assert waiter.entry is entry
        assert (waiter.hold is not None) == (waiter.state == UNTOLD)
        assert _is_set(waiter) == (waiter.state in (WAITING, RESERVED, EXPECTED))
        assert waiter.is_away == (waiter.peer is NOBODY)
        assert (waiter.state == RESERVED) <= waiter.is_away
    if queue is None:
        return
    assert len(queue) == len(waiters)
    assert bool(queue) == bool(waiters)
    assert queue.oldest() is min(waiters, key=lambda each: each.number, default=None)
    assert queue.away == sum(waiter.is_away for waiter in waiters)
    assert queue.present == len(waiters) - queue.away
    _check_aside(queue, waiters)
    in_line = [waiter for waiter in waiters if waiter.state not in (EXPECTED, PASSED)]
    processes = Counter(each.process for each in in_line if each.process is not None)
    assert queue.processes == dict(processes)
    if isinstance(queue, GroupedQueue):
        _check_groups(entry, queue, in_line)
    else:
        assert all(waiter.group is None for waiter in waiters)
        _check_lines(queue, in_line)
    for hold in holds.values():
        assert (hold.waiter is not None) <= (hold.waiter is not None and hold.waiter.hold is hold)


def _check_aside(queue: Queue[Waiter], waiters: list[Waiter]) -> None:
    """Who has its turn, or has had it, and what is set aside for them."""
    expected = [waiter for waiter in waiters if waiter.state == EXPECTED]
    by_number = sorted(expected, key=lambda each: each.number)
    assert queue.expected == [waiter for waiter in by_number if waiter.is_away]
    assert queue.told == [waiter for waiter in by_number if not waiter.is_away]
    assert set(queue.passed) == {waiter for waiter in waiters if waiter.state == PASSED}
    assert queue.places == sum(waiter.weight for waiter in expected if waiter.is_rated)
    held = sum(waiter.weight for waiter in queue.told)
    assert queue.set_aside == held + queue.extra


def _check_lines(lines: Lines[Waiter], in_line: list[Waiter]) -> None:
    """Who stands in the lines of a queue or a group."""
    plain = [waiter for waiter in in_line if not waiter.is_rated]
    rated = [waiter for waiter in in_line if waiter.is_rated]
    _check_line(lines, plain)
    if lines.rated is None:
        assert not rated
    else:
        _check_line(lines.rated, rated)


def _check_line(line: Line[Waiter], waiters: list[Waiter]) -> None:
    _check_row(line, [waiter for waiter in waiters if waiter.process is None])
    assert line.called == sum(waiter.process is not None for waiter in waiters)
    assert line.length == len(waiters)
    assert set(line.rows) == {waiter.process for waiter in waiters} - {None}
    for process, row in line.rows.items():
        _check_row(row, [waiter for waiter in waiters if waiter.process is process])


def _check_row(row: WaiterRow[Waiter], waiters: list[Waiter]) -> None:
    assert row.size == len(waiters)
    assert {*row.line, *row.returned} == set(waiters)
    for each in (list(row.line), row.returned):
        assert each == sorted(each, key=lambda waiter: waiter.number)


def _check_groups(entry: Entry, queue: GroupedQueue[Waiter], in_line: list[Waiter]) -> None:
    holds = entry.holds
    assert set(queue._held) <= set(holds)
    assert all(queue._lanes.get(lane.name) is lane for lane in queue._held.values())
    weights = {fence: hold.weight for fence, hold in holds.items() if hold.weight > 1}
    assert queue._weights == weights
    assert queue.extra == sum(weight - 1 for weight in weights.values())
    assert queue._told_extra == sum(waiter.weight - 1 for waiter in queue.told)
    assert queue._expected_extra == sum(waiter.weight - 1 for waiter in queue.expected)
    assert queue._heavy == sum(waiter.weight > 1 for waiter in in_line)
    assert queue._queued == len(in_line)
    taken: Counter[bytes] = Counter()
    for fence, lane in queue._held.items():
        taken[lane.name] += holds[fence].weight
    for waiter in (*queue.told, *queue.expected):
        taken[_name(waiter)] += waiter.weight
    lanes = {_name(waiter): [w for w in in_line if _name(w) == _name(waiter)] for waiter in in_line}
    assert set(queue._lanes) == set(lanes) | set(taken)
    for name, lane in queue._lanes.items():
        theirs = lanes.get(name, [])
        assert (lane.name, lane.taken) == (name, taken[name])
        _check_lines(lane, theirs)
        may = theirs if lane.has_room(1) else []
        ready = [] if lane.is_stuck else may
        plain = [w for w in may if not (w.is_rated or lane.is_plain_stuck)]
        rated = [waiter for waiter in ready if waiter.is_rated]
        assert lane.waiting == len(theirs)
        assert lane.ready == len(ready)
        assert lane.rated_ready == sum(waiter.process is None for waiter in rated)
        assert lane.plain == sum(waiter.process is None for waiter in plain)
        assert (name in queue._resting) == bool(theirs and not ready)
        assert (lane in queue._ring.lanes) == bool(ready)
        assert (lane in queue._plain_ring.lanes) == bool(plain)
    there = list(queue._lanes.values())
    assert queue.groups == sum(lane.waiting > 0 for lane in there)
    assert queue._rated_ready == sum(lane.rated_ready for lane in there)
    assert queue._plain == sum(lane.plain for lane in there)
    assert all(queue._lanes.get(name) is lane for name, lane in queue._resting.items())
    _check_ring(queue._ring, queue, is_plain=False)
    _check_ring(queue._plain_ring, queue, is_plain=True)


def _check_ring(ring: Ring[Waiter], queue: GroupedQueue[Waiter], *, is_plain: bool) -> None:
    turns = list(ring.lanes.values())
    assert turns == sorted(turns)
    assert len(turns) == len(set(turns))
    assert all(queue._lanes.get(lane.name) is lane for lane in ring.lanes)
    for process in (None, *queue.processes):
        theirs = [lane for lane in ring.lanes if _has(lane, process, is_plain=is_plain)]
        heap = ring._heaps.get(process)
        listed = {} if heap is None else {lane: turn for turn, lane in heap.turns}
        assert all(lane in listed and listed[lane] <= ring.lanes[lane] for lane in theirs)
        if heap is not None:
            assert len(heap.turns) == len(heap.lanes) == len(listed)
            assert set(listed) == heap.lanes
    assert set(ring._heaps) <= {None, *queue.processes}


def _has(lane: Lane[Waiter], process: ClientProcess | None, *, is_plain: bool) -> bool:
    return lane.has(process) if is_plain else lane.has_any(process)


def _name(waiter: Waiter) -> bytes:
    return b"" if waiter.group is None else waiter.group.name


def _check_rates(table: LockTable, partitions: list[Partition]) -> None:
    rates = table.rates
    size = promised = 0
    resting = set()
    for partition in partitions:
        book = partition.rates
        for (space, key), rate in book.open.items():
            size, promised = size + 1, promised + rate.runs
            assert (rate.space, rate.key, rate.book) == (space, key, book)
            entry = partition.spaces[space].get(key)
            if entry is None:
                resting.add(rate)
            else:
                assert entry.waiters is not None
                assert entry.waiters.rate is rate
            _check_rate(rate, entry)
        for space, entries in enumerate(partition.spaces):
            for key, entry in entries.items():
                known = None if entry.waiters is None else entry.waiters.rate
                assert known is book.open.get((space, key))
                assert bytes((space,)) + key not in book.packed
        for pack in set(book.packed.values()):
            assert {name for name, other in book.packed.items() if other is pack} == {*pack.names}
            size += len(pack.names)
            each = [pack.of(name) for name in pack.names]
            promised += sum(runs for runs, _, _ in each)
            if (book, pack.kind) in rates._packing and rates._packing[book, pack.kind] is pack:
                sizes = [packed_size(n, e[2]) for n, e in zip(pack.names, each, strict=True)]
                assert pack.size == sum(sizes)
    assert (rates.size, rates.promised) == (size, promised)
    assert set(rates._open) == resting


def _check_rate(rate: KeyRate, entry: Entry | None) -> None:
    assert rate.taken == sum(rate.pending.values())
    assert all(places > 0 for places in rate.pending.values())
    assert set(rate.pending) <= set(entry.holds if entry is not None else ())
    for block in rate.blocks:
        assert block.places == sum(block.begun[block.first + 1 :: 2])
        assert block.first % 2 == len(block.begun) % 2 == 0
    assert rate.begun == sum(block.places for block in rate.blocks)
    over = [block.first == len(block.begun) for block in rate.blocks[: rate.over]]
    assert all(over)
    assert len(over) < len(rate.blocks)
    assert _is_set(rate)


def _check_peers(table: LockTable, holds: list[Hold], waiters: list[Waiter]) -> None:
    peers = table.connections.peers
    assert all(peer.id == number and not peer.ended for number, peer in peers.items())
    of_peers: dict[Any, set[Hold]] = {}
    for hold in holds:
        if hold.peer is not None:
            of_peers.setdefault(hold.peer, set()).add(hold)
            assert hold in hold.peer.holds
            assert hold.peer.ended or peers[hold.peer.id] is hold.peer
    made = Counter(waiter.maker for waiter in waiters if waiter.maker is not None)
    assert all(maker.kept == number for maker, number in made.items())
    for waiter in waiters:
        assert not waiter.two_phase or waiter.peer.ended or _enqueued(waiter) is waiter
    for peer in peers.values():
        assert set(peer.holds) == of_peers.get(peer, set())
        assert peer.kept == made[peer]
        for name, waiter in peer.enqueued.items():
            assert waiter.peer is peer
            assert waiter.two_phase
            assert (waiter.entry.space, waiter.entry.key) == name
            assert waiter in waiters or (waiter.hold is not None and waiter.hold.waiter is waiter)
        if isinstance(peer.waiting, Waiter) and peer.waiting.number >= 0:
            assert peer.waiting in waiters
            assert peer.waiting.peer is peer
        elif isinstance(peer.waiting, ClientProcess):
            assert peer.waiting.asking is peer
    processes = Counter(peer.process for peer in peers.values() if peer.process is not None)
    known = table.connections.processes
    assert set(known.values()) == set(processes)
    for process, number in processes.items():
        assert process.connections == number
        assert process.asking is None or process.asking.waiting is process
        assert all(process in entry.queue().processes for entry in process.starved)
        for lane, entry in process.behind.items():
            assert entry.queue()._lanes.get(lane.name) is lane
            assert lane.has_any(process)


def _enqueued(waiter: Waiter) -> Waiter | None:
    return waiter.peer.enqueued.get((waiter.entry.space, waiter.entry.key))


def _is_set(item: Timed) -> bool:
    return getattr(item, "chain", None) is not None
