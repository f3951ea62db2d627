"""What it costs, against what else people use: ``make bench``, or ``python -m benchmarks --help``.

`loads` has a module for each load, which says what it does and what it compares. `programs` are run
as processes of their own. `topic` is one row of the results, `bench` and `servers` are what the
loads share, `record` keeps the figures, `table`, `plots` and `report` show them.

The method is the same for all:

- Everything compared runs in turn, round after round, on one machine in one run. Each round begins
  with another one, so that what disturbs the machine disturbs all alike.
- A figure is the median of its rounds. A ratio is taken within a round; what is shown is the median
  of these ratios, and their spread: how far the middle half of them is apart, as a share of the
  median. Where a ratio with a goal has a spread of more than a fifth, there are more rounds.
- Each starts warm: connections are made and something has been done before anything is counted.
- Where two processes could push each other from core to core, they are tied to one or two cores.
- CPU time is the kernel's count for the process in nanoseconds, not its ticks.

Absolute times say something about this machine only.
"""
