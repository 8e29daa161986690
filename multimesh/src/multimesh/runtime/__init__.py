"""How a plan is compiled and run: executables, transfers."""
