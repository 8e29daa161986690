"""What the commands run: the demonstration, and forecasts."""
