"""What outlives the process: the state directory and the journal of holds in it."""
