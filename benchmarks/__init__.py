"""Benchmarks of the lock server and its clients."""
