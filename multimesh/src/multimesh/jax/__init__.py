"""The public API under the import path of the original MultiMesh: ``import multimesh.jax as mm``.

The same names, plus those that only the original has; what the two write in another form takes the original's too.
"""

from multimesh import *  # noqa: F403
from multimesh import __all__ as _here
from multimesh.original import *  # noqa: F403
from multimesh.original import __all__ as _original

__all__ = sorted({*_here, *_original})
