"""Servers with a fault each, to see whether the checker finds it."""
