"""What happens to a task that does not run, or not now."""
