"""Runnable examples of celery-dflock."""
