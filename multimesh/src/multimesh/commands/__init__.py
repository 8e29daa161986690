"""The commands: forecasts, and checks of processes and devices."""
