"""What is run, as data: kernels, slots and one order of instructions; its listing, fingerprint and forecast."""
