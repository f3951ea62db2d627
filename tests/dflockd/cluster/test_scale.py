"""A few servers go through all that `scale` counts of a hundred."""

from tests.dflockd.cluster import scale


def test_a_large_cluster_is_run_through_all_that_happens_to_it():
    phases = {phase.name: phase for phase in scale.run(3, 1024, 1)}

    assert list(phases) == [
        "first start of all",
        "30 s of rest",
        "a server joins, and `rebalance`",
        "1 are restarted one by one",
        "a server crashes",
        "all are stopped and started",
    ]
    assert all(phase.transactions > 0 and phase.seconds > 0 for phase in phases.values())
    # One of three servers has a third of 8192 shards, in values of some bytes.
    assert phases["a server joins, and `rebalance`"].changes > 8192 / 4
    assert phases["30 s of rest"].changes < phases["first start of all"].changes / 100
