"""A few servers go through all that `scale` counts of a hundred."""

from tests.dflockd.cluster import scale

SHARDS = 2048


def test_a_large_cluster_is_run_through_all_that_happens_to_it():
    phases = {phase.name: phase for phase in scale.run(3, 1024, 1, SHARDS)}

    assert list(phases) == [
        "first start of all",
        "30 s of rest",
        "a server joins, and `rebalance`",
        "1 are restarted one by one",
        "a server crashes",
        "all are stopped and started",
    ]
    assert all(phase.transactions > 0 and phase.seconds > 0 for phase in phases.values())
    # Each of four servers has a quarter of the shards.
    assert phases["a server joins, and `rebalance`"].changes >= SHARDS / 4
    assert phases["30 s of rest"].changes < phases["first start of all"].changes / 100
