"""MaxText on MultiMesh: the flags, checks, translation and launch behind ``maxtext/run.py``.

Two processes. The command (`cli` and what it imports) never imports JAX: a wrong flag is answered within a
second. It starts MaxText's trainer. There the patched MaxText calls `hooks`, which imports `step`, `placement` and
`relayout`.
Imports go one way, and every error that reaches the user is one of `errors`, with an exit code of its own.
"""
