"""The memory that a pipeline's train step will need on the devices of each stage."""

from __future__ import annotations

import math
from typing import Any

import jax

from multimesh import Lowered
from multimesh_maxtext.memory import Need


def needs(lowered: Lowered, state: Any) -> list[Need]:
    """Return what each stage needs.

    Parameters
    ----------
    lowered
        The train step.
    state
        The train state, arrays or their types, each leaf with its sharding: the first argument of the step.
    """
    held: dict[tuple[str, frozenset[jax.Device]], int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = getattr(path[0], "key", getattr(path[0], "name", ""))
        key = name, frozenset(leaf.sharding.device_set)
        held[key] = held.get(key, 0) + math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    result = []
    for mesh, found in zip(lowered.plan.submeshes, lowered.memory_forecast(), strict=True):
        parameters, optimizer = (held.get((name, frozenset(mesh.devices.flat)), 0) for name in ("model", "optimizer"))
        batch = max(0, found.arguments - parameters - optimizer)
        result.append(Need(parameters, optimizer, batch, found.sums, found.values, found.workspace))
    return result
