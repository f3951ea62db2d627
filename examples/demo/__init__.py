"""The demo: the same tasks without and with locks, and what a kill -9 leaves behind.

`make demo` runs it. `tasks.py` is what an application would write.
"""
