"""How a plan is compiled and run: programs, transfers, several processes."""
