"""What becomes of a task that does not run, or not now."""
