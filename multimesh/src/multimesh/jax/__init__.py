"""The public names under the original's import path: ``import multimesh.jax as mm``.

It has the names of `multimesh` and those that only the original has. Where the two differ, a function takes the calls
of both.
"""

from multimesh import *  # noqa: F403
from multimesh import __all__ as _here
from multimesh.jax.original import *  # noqa: F403
from multimesh.jax.original import __all__ as _original

__all__ = sorted({*_here, *_original})
