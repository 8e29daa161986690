"""What a plan needs, and how long it takes: memory, profiles."""
