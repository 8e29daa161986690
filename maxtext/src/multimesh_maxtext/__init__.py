"""MaxText on MultiMesh: the flags, checks, translation and launch behind ``maxtext/run.py``.

The command does not import JAX: a wrong flag is answered in a tenth of a second, and the trainer is a process of its
own. In that process run `hooks` and what it uses: `stages` and `placement`.
"""
