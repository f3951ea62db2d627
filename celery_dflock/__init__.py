"""FIFO distributed locks for Celery tasks."""
