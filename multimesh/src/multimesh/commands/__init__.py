"""The commands: demonstration, forecasts, suggestions, processes."""
