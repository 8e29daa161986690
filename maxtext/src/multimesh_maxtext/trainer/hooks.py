"""The hooks of the patched MaxText call these functions in the trainer's process of a pipeline.

MaxText builds its model for the mesh of one stage, without devices. The hooks place the layers, parameters and
optimizer state on the submeshes of their stages, make the gradient accumulation the microbatch loop, and
compile the step with `multimesh.jit`. MaxText's data, metrics and checkpoints work with the first stage's mesh.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh
from multimesh_maxtext.errors import LauncherError
from multimesh_maxtext.handoff import TrainerConfig, find_schedule, receive
from multimesh_maxtext.trainer import placement, processes, step
from multimesh_maxtext.trainer.checkpointer import telling

_stages: placement.Stages | None = None
_specs: dict[tuple[str, ...], P] = {}
"""Layout of each parameter, by its path in the model."""
_layers: list[tuple[Any, Any, Any]] = []
"""In a forecast: the model, the arguments and the layer of each kind of layer that was made."""


@functools.cache
def _config() -> TrainerConfig:
    return receive(os.environ)


def _schedule() -> multimesh.schedules.Schedule:
    config = _config()
    schedule = find_schedule(config.schedule, config.table)
    if isinstance(schedule, multimesh.schedules.Auto):
        return replace(schedule, route=config.route, device=config.limit or None)
    return schedule


def _current() -> placement.Stages:
    if _stages is None:
        raise LauncherError("MaxText built a model before its mesh; is third_party/maxtext patched? run ./bootstrap.sh")
    return _stages


def everywhere(x: Any) -> Any:
    """Send the number of the step, which MaxText reads in all processes; a forecast, without arrays, begins with 0."""
    return 0 if _config().forecast else processes.everywhere(x)


def stage_devices(devices: Sequence[jax.Device] | None = None) -> list[jax.Device]:
    """Return the devices of the first stage: MaxText sizes its mesh and its batches by them."""
    every = list(jax.devices() if devices is None else devices)
    return every[: len(every) // _config().stages]


def model_mesh(config: Any, mesh: Mesh) -> AbstractMesh:
    """Return the mesh that the model is built with: its sharding constraints fit any stage."""
    global _stages
    ours = _config()
    _stages = placement.Stages(
        placement.stage_meshes(mesh, ours.stages, jax.devices()),
        layers=config.num_decoder_layers,
        interleave=ours.interleave,
        placement=_schedule().placement(ours.stages),
        sizes=ours.sizes,
        dense=config.first_num_dense_layers,
    )
    return mesh.abstract_mesh


def first_device(_mesh: AbstractMesh) -> Any:
    """Return a stand-in for the first device of a mesh without devices. MaxText only asks for its ``platform``."""
    return SimpleNamespace(platform=_config().platform or jax.devices()[0].platform)


def place_state(abstract_state: Any, shardings: Any, checkpoints: Any) -> tuple[Any, Any, Any]:
    """Place the types and shardings of the train state by stage. A checkpoint may hold it in another layout."""
    stages, below = _current(), _config().replicate_below
    for path, sharding in jax.tree_util.tree_leaves_with_path(shardings):
        of, *names = placement.name_path(path)
        _specs.update({tuple(names): sharding.spec} if of == "model" else {})
    if _config().zero:  # each device keeps and updates its part of the moments, and XLA gathers parameters after that

        def spread(path: Any, x: Any, sharding: NamedSharding) -> NamedSharding:
            moment = placement.name_path(path)[0] == "optimizer"
            return placement.spread_over_data(x, sharding) if moment else sharding

        shardings = jax.tree_util.tree_map_with_path(spread, abstract_state, shardings)
    if below:
        shardings = jax.tree.map(
            lambda x, s: NamedSharding(s.mesh, P()) if x.size < below else s, abstract_state, shardings
        )
    shardings = stages.shardings(shardings)
    return placement.lay_out(abstract_state, shardings), shardings, checkpoints and telling(checkpoints, stages.layers)


def init_state(fn: Callable[[], Any], *, out_shardings: Any, **_: None) -> Callable[[], Any]:
    """Return a function that creates the train state, each leaf on its stage."""

    def create() -> Any:
        if _config().forecast:
            return placement.lay_out(jax.eval_shape(fn), out_shardings)
        state = _current().create(fn, out_shardings)
        placement.write_placement(Path(_config().placement), created=state)
        return state

    return create


def new_layer(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a layer of an unrolled model. A forecast only needs shapes, so it copies the first layer of each kind."""
    if not _config().forecast:
        return make(*args, **kwargs)
    owner = getattr(make, "__self__", None)
    like = next((layer for model, arguments, layer in _layers if model is owner and arguments == (args, kwargs)), None)
    if like is not None:
        return nnx.clone(like)
    _layers.append((owner, (args, kwargs), make(*args, **kwargs)))
    return _layers[-1][2]


_keep_trace = functools.lru_cache(maxsize=1)(jax.jit)
"""Makes a function whose trace JAX keeps, for the layers that are like the first."""


def attention(kernel: Callable[..., Any], sums: bool = True) -> Callable[..., Any]:
    """Return a kernel for GPUs; for a forecast, which needs no GPU, a function with its results and residuals.

    cuDNN's kernel returns its ``sums`` beside the result, that of tokamax keeps them to itself. A forecast that
    compiles needs the kernel.
    """
    if not _config().forecast or _config().target:
        return kernel
    return lambda *arrays, **_settings: step.like_flash_attention(*arrays)[slice(2) if sums else 0]


def layer(number: int, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make a layer a task on the submesh of its stage."""
    if _config().forecast:
        fn = _keep_trace(fn)
    return multimesh.task(fn, f"layer{number}", mesh=_current().of_layer(number))


def stacks(_length: int, rngs: Any = None) -> list[tuple[str, int, Any]]:
    """Return the stacks of scanned layers: one per piece of a stage, where MaxText alone has one of all layers."""
    return placement.list_stacks(_current().pieces, rngs)


def stack(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make MaxText's scan over a stack of layers a task on the submesh of its stage."""
    home = _current().of_layer(int(name.split("_")[1]))

    def scan(stack: nnx.Module, y: Any, *args: Any) -> tuple[Any, nnx.Module, None]:
        graph, params, others = nnx.split(stack, nnx.Param, ...)

        def pure(params: Any, others: Any, y: Any, *args: Any) -> tuple[Any, Any]:
            y, scanned, _ = fn(nnx.merge(graph, params, others), y, *args)
            return y, nnx.state(scanned, nnx.Not(nnx.Param))

        y, others = multimesh.task(pure, name, mesh=home)(params, others, y, *args)
        nnx.update(stack, others)
        return y, stack, None

    return scan


def accumulate(
    body: Callable[[Any, Any], tuple[Any, Any]], init: dict[str, Any], batch: Any, *, length: int, **_split: Any
) -> tuple[dict[str, Any], Any]:
    """Run MaxText's accumulation over microbatches as the microbatch loop, which cuts as MaxText's ``split`` does."""
    home = _current().of_path
    if _config().gather_once:
        init = {**init, step.PARAMETERS: placement.gather(init[step.PARAMETERS], _specs, home)}
    return step.accumulate_microbatches(
        body, init, batch, length=length, home=home, schedule=step.measured or _schedule()
    )


def gradient_layouts(gradients: Any, shardings: Any) -> Any:
    """Return the layouts of gradients after the loop: those of their parameters or, with ZeRO-2, of their moments.

    XLA then scatters each sum over the devices of the axis ``data``, where it would send the whole sum to all.
    """
    return jax.tree.map(placement.spread_over_data, gradients, shardings) if _config().zero > 1 else shardings


def jit(fn: Callable[..., Any], *, donate_argnums: Any = (), **_shardings: Any) -> step.StepFunction:
    """Compile a step; arguments keep their layouts, and the new state takes that of the old."""
    return step.StepFunction(fn, donate_argnums, _config())
