"""Singleton beat: run as many ``celery beat -S dflock`` as you like, exactly one sends."""

from celery_dflock.beat.scheduler import DflockScheduler

__all__ = ["DflockScheduler"]
