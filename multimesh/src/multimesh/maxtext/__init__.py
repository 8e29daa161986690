"""MaxText on MultiMesh: the flags, checks, translation and launch behind ``maxtext/run.py``.

Nothing here imports JAX: a wrong flag is answered in a tenth of a second, and the trainer is a process of its own.
"""
