"""Owners on a stage, from the beginning to a good end."""

from __future__ import annotations

from tests.dflockd.client.homes import Home
from tests.dflockd.client.owners import Owner
from tests.dflockd.client.stage import Stage


def play(stage: Stage, owners: int, processes: int, rudeness: float, seconds: float) -> None:
    """Let some owners do what they like for a while, and then all of it end."""
    homes = [Home(stage) for _ in range(processes)]
    stage.homes = homes
    players = [Owner(stage, homes[n % processes], rudeness) for n in range(owners)]
    stage.soon(stage.trouble, 1.0)
    stage.pass_time(seconds)
    stage.is_calm = True
    for player in players:
        player.retire()
    stage.pass_time(120.0)
    end(stage)


def end(stage: Stage) -> None:
    """See that nothing is left."""
    for home in stage.homes:
        if home.tasks:
            stage.wrong("all comes to an end", f"{len(home.tasks)} flows are under way")
    for wire in stage.wires:
        link = wire.link()
        idle = [link is each for each in wire.home.pool.idle].count(True)
        if wire.closed + idle != 1:
            stage.wrong("every link closed or given back once", f"{wire} at the end")
    for lease in stage.leases:
        if not lease.is_over:
            stage.wrong("all comes to an end", f"a lease goes on, {lease.state}")
        if lease.losses != (lease.state == "lost"):
            stage.wrong("told of a loss once", f"{lease.losses} times, and it is {lease.state}")
    if stage.service.holds:
        stage.wrong("all comes to an end", f"held: {list(stage.service.holds)}")
    if stage.faults:
        raise stage.faults[0]
