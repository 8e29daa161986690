"""MaxText on MultiMesh: the flags, checks, translation and launch behind ``maxtext/run.py``.

Two processes. `command` never imports JAX: a wrong flag is answered within a second. It starts MaxText's trainer, where
the patched MaxText calls `trainer.hooks`. Neither imports the other: `handoff` has the words that they exchange.
Every error that reaches the user is one of `errors`, with an exit code of its own.
"""
