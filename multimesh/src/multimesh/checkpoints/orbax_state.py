"""Handlers of Orbax's new checkpointer for arrays that one process holds alone, or not at all.

Orbax's own handler refuses such arrays.
"""

from __future__ import annotations

from typing import Any

import jax
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.experimental.v1._src.serialization.array_leaf_handler import (
    AbstractShardedArray,
    ArrayLeafHandler,
)
from orbax.checkpoint.experimental.v1._src.serialization.registry import StandardLeafHandlerRegistry

from multimesh.checkpoints.orbax_arrays import ArrayHandler


class Arrays(ArrayLeafHandler):
    """Orbax's handler of ``jax.Array``, which writes and reads with ours."""

    def __init__(self, *, context: Any = None) -> None:
        super().__init__(context=context)
        self._handler_impl = ArrayHandler()


class StateHandler(ocp.handlers.PyTreeHandler):
    """Orbax's handler of nested dictionaries, with our handler for arrays."""

    def __init__(self, *, context: Any = None) -> None:
        leaves = StandardLeafHandlerRegistry()
        leaves.add(jax.Array, AbstractShardedArray, Arrays, override=True, secondary_typestrs=["jax.Array"])
        super().__init__(context=context, leaf_handler_registry=leaves)
