"""The containers have a suite of their own: `make smoke`."""

collect_ignore = ["smoke"]
