"""One module for each load; `load(bench)` of each is a context that gives a `benchmarks.topic.Load`.

They are imported when they are chosen: some need what only requirements-bench.txt brings.
"""

NAMES = (
    "server_cpu",
    "with_lock",
    "hand_off",
    "tasks",
    "task_cpu",
    "growth",
    "storm",
    "two_servers",
    "renewals",
    "options",
    "instructions",
    "waiting",
    "cluster_scale",
)
