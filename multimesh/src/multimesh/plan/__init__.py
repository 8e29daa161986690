"""What will run, as data: kernels, slots, instructions; its forecast."""
