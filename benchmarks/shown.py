"""What is shown where there is little room: in the plot and in the README."""

COMPARED = {
    "server-cpu-64": "CPU of the server for one lock, 64 connections, µs",
    "with-lock-tcp": "“with lock: pass” in a program, TCP, µs",
    "task-cpu": "CPU that a lock adds to a Celery task, all processes, µs",
    "hand-off": "From a release to the next holder, ms",
}
"""The topics, and what is written above each."""

LABELS = {
    "a server that does not look": "fixed answers (uvloop)",
    "bare socket, same exchange": "bare socket",
    "bare sockets, same exchange": "bare sockets",
    "redis-py Lock in the body": "redis-py Lock",
}

LEFT_OUT = {"LockedTask with lock_unique"}
"""It does more than the others."""
