"""The commands of ``python -m multimesh``: demonstration, forecasts, suggestions, processes."""
