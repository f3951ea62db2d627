"""Singleton beat: run several ``celery beat -S dflock``, and exactly one of them sends."""

from celery_dflock.beat.scheduler import DflockScheduler

__all__ = ["DflockScheduler"]
