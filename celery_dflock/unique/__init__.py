"""``lock_unique``: a task is sent unless another like it is on its way."""
