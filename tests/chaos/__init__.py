"""Chaos: real processes under faults, the record of what they did, and a checker that judges it.

`python -m tests.chaos` (or `make chaos`) does a run of it; with `--cluster` over servers that share an
etcd. `python -m tests.chaos.figures` measures such a cluster.

- `history` is the record; `checker` judges it, `timeline` draws it, `outcome` sums it up.
- `client`, `bare` and `jobs` use the locks, for a `section` each; `resource` is what they protect.
- `network` lies between them and the servers.
- `faults` says what happens when, `driver` does it to the `processes` and to the `cluster`.
- `losses` tells of each lock that a holder in a cluster has lost what was in the way of a renewal.
- `stepped`, `tight` and `planted` are lock servers with wrong clocks, small files and bugs.
"""
