"""The public API under the import path of the original MultiMesh: ``import multimesh.jax as mm``."""

from multimesh import *  # noqa: F403
from multimesh import __all__ as __all__
