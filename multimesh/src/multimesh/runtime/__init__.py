"""How a plan is compiled and run: kernels, the runner, transfers."""
