"""What the containers of a run and its driver call the same."""

TICK = "tick"
"""The key of the job that beat sends."""


def group(container: str) -> int:
    """A number for all processes of a container: from its id, and larger than any pid."""
    return int(container[:8], 16) << 22
