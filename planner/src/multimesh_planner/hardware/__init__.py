"""Accelerators: their rates, and the seconds of kernels and collectives."""
