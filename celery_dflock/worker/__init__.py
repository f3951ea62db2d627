"""What a worker has of the plugin: where tasks wait, what it tells, and how it ends."""
