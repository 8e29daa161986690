"""The original's helpers for Flax linen: ``from multimesh.jax.flax import task, shard_axes, parallelize_step``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, PartitionSpec

from multimesh.calling.parallelize import parallelize
from multimesh.errors import UsageError
from multimesh.jax import calls
from multimesh.jax.calls import with_sharding_constraint
from multimesh.marking.flax_modules import subclass

__all__ = ["parallelize_step", "shard_axes", "task", "with_sharding_constraint"]


def task(model: type[nn.Module], name: str | None = None, **where: Any) -> type[nn.Module]:
    """Return a class of modules whose ``__call__`` is a task. Fields, name and parameters stay those of ``model``.

    Parameters
    ----------
    model
        A class of linen modules.
    name, where
        As in `multimesh.jax.task`; by default the name of the class, and all devices.

    Raises
    ------
    UsageError
        If ``model`` is no such class, or the arguments do not fit together.
    """
    if not (isinstance(model, type) and issubclass(model, nn.Module)):
        raise UsageError(f"multimesh.jax.flax.task: expected a class of linen modules, got {model!r}")

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        calls.task(call, name or model.__name__, **where)  # so that arguments that do not fit are found now

        @functools.wraps(call)
        def placed(self: Any, *args: Any, **kwargs: Any) -> Any:
            with calls.task(None, name or model.__name__, **(where or {"devices": np.asarray(jax.devices())})):
                return call(self, *args, **kwargs)

        return placed

    return subclass(model, wrapped)


def shard_axes(*args: str | None) -> Callable[..., Any]:
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
    """Return a training step of a model, and its first state.

    Parameters
    ----------
    model
        A linen module whose ``apply(params, batch)`` returns the loss. It has tasks, wrapped or registered.
    optimizer
        An optax optimizer.
    mesh
        The devices that tasks may use; by default all.
    global_batch, local_batch
        An example of a batch. With one process both mean the same.
    replicate_inputs
        Whether the submeshes that read a batch hold all of it. Otherwise its layout is derived, as for parameters.

    Returns
    -------
    step, state, mesh[, prepare_batch]
        ``step(state, batch)`` returns loss and new state. ``state`` is a Flax ``TrainState``; its parameters are made
        from ``jax.random.key(42)``, each on its task's submesh. ``prepare_batch`` comes with ``local_batch``.

    Raises
    ------
    UsageError
        If arguments do not fit together.
    """
    if (global_batch is None) == (local_batch is None):
        raise UsageError("parallelize_step: give either global_batch= or local_batch=, not both or neither")
    mesh = mesh or Mesh(np.asarray(jax.devices()), ("x",))
    example = jax.tree.map(np.asarray, global_batch if local_batch is None else local_batch)

    def init() -> Any:
        return TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(42), example), tx=optimizer)

    def step(state: Any, batch: Any) -> Any:
        params = jax.tree.map(_constrain_by_names, state.params, is_leaf=_is_boxed)
        if replicate_inputs:
            batch = with_sharding_constraint(batch, PartitionSpec())
        loss, grads = jax.value_and_grad(model.apply)(params, batch)
        return loss, state.apply_gradients(grads=grads)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), example)
    fn, make = parallelize(step, init_params=init, initial_batch=shapes, devices=mesh.devices)[:2]
    made = fn, make(), mesh
    return made if local_batch is None else (*made, functools.partial(jax.tree.map, np.asarray))


def _is_boxed(x: Any) -> bool:
    return isinstance(x, nn.Partitioned)


def _constrain_by_names(x: Any) -> Any:
    return x.replace_boxed(with_sharding_constraint(x.value, PartitionSpec(*x.names))) if _is_boxed(x) else x
