"""The original's helpers for Flax linen: ``from multimesh.jax.flax import task, shard_axes, parallelize_step``."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, PartitionSpec

from multimesh.calling.parallelize import parallelize
from multimesh.errors import UsageError
from multimesh.jax import task, with_sharding_constraint

__all__ = ["parallelize_step", "shard_axes", "task", "with_sharding_constraint"]


def shard_axes(*args: str | None) -> Any:
    """Return a Xavier-normal initializer of a parameter with these logical names of its dimensions."""
    return nn.with_partitioning(nn.initializers.xavier_normal(), args)


def parallelize_step(
    model: nn.Module,
    optimizer: Any,
    mesh: Mesh | None = None,
    global_batch: Any = None,
    local_batch: Any = None,
    replicate_inputs: bool = True,
) -> tuple[Any, ...]:
    """Return a training step of a linen module, its first state, the mesh, and with ``local_batch`` ``prepare_batch``.

    ``step(state, batch)`` returns the loss, which is ``model.apply(params, batch)``, and the new ``TrainState``. Both
    batches are examples, and mean the same. Submeshes read a whole batch, unless ``replicate_inputs`` is False.
    """
    if (global_batch is None) == (local_batch is None):
        raise UsageError("parallelize_step: give either global_batch= or local_batch=, not both or neither")
    mesh = mesh or Mesh(np.asarray(jax.devices()), ("x",))
    example = jax.tree.map(np.asarray, global_batch if local_batch is None else local_batch)

    def constrain(x: Any) -> Any:
        names = PartitionSpec(*x.names) if isinstance(x, nn.Partitioned) else None
        return x if names is None else x.replace_boxed(with_sharding_constraint(x.value, names))

    def init() -> Any:
        return TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(42), example), tx=optimizer)

    def step(state: Any, batch: Any) -> Any:
        params = jax.tree.map(constrain, state.params, is_leaf=lambda x: isinstance(x, nn.Partitioned))
        batch = with_sharding_constraint(batch, PartitionSpec()) if replicate_inputs else batch
        loss, grads = jax.value_and_grad(model.apply)(params, batch)
        return loss, state.apply_gradients(grads=grads)

    fn, make = parallelize(step, init_params=init, initial_batch=example, devices=mesh.devices)[:2]
    results = fn, make(), mesh
    return results if local_batch is None else (*results, functools.partial(jax.tree.map, np.asarray))
