"""What a run needs and how long it takes: memory, measurements, profiles."""
