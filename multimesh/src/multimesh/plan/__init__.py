"""The plan as data: kernels, slots, instructions; its forecast."""
