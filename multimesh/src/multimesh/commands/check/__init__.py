"""The steps of ``python -m multimesh check``."""
