"""Compilation and execution of a plan: kernels, the runner, transfers."""
