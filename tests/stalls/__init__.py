"""What one client can do at its worst, and for how long a server is away for the others meanwhile."""
