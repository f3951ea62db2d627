"""Measurements: ratios against peers, taken in one run on one machine."""
