"""Measurements and forecasts of a plan: time, memory, profiles."""
