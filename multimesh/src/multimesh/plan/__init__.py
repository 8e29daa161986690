"""The plan as data: kernels, slots, instructions; its listing, fingerprint and forecast."""
