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
from multimesh_maxtext.handoff import Handoff, find_schedule, receive
from multimesh_maxtext.trainer import processes, relayout
from multimesh_maxtext.trainer.checkpointer import telling
from multimesh_maxtext.trainer.placement import (
    Stages,
    apply_stack,
    deal,
    gather,
    list_stacks,
    parameter_specs,
    spread_optimizer,
    spread_over_data,
    write_placement,
)
from multimesh_maxtext.trainer.step import (
    PARAMETERS,
    StepFunction,
    accumulate_microbatches,
    eval_types,
    like_flash_attention,
)

_stages: Stages | None = None
_auto: multimesh.schedules.Auto | None = None
"""The schedule of ``--schedule auto``, with the memory and the costs that are known by now."""
_specs: dict[str, P] = {}
"""Layout of each parameter, by its path in the model."""
_made: list[tuple[Any, Any, Any]] = []
"""In a forecast: the model, the arguments and the layer of each kind of layer that was made."""


@functools.cache
def _handoff() -> Handoff:
    return receive(os.environ)


def _schedule() -> multimesh.schedules.Schedule:
    given = _handoff()
    schedule = find_schedule(given.schedule, given.table)
    if isinstance(schedule, multimesh.schedules.Auto):
        return replace(schedule, route=given.route, device=given.limit or None)
    return schedule


def _current() -> Stages:
    if _stages is None:
        raise LauncherError("MaxText built a model before its mesh; is third_party/maxtext patched? run ./bootstrap.sh")
    return _stages


def stage_devices(devices: Sequence[jax.Device] | None = None) -> list[jax.Device]:
    """Return the devices of the first stage: MaxText sizes its mesh and its batches by them."""
    every = list(jax.devices() if devices is None else devices)
    return every[: len(every) // _handoff().stages]


def model_mesh(config: Any, mesh: Mesh) -> AbstractMesh:
    """Return the mesh that the model is built with: its sharding constraints fit any stage."""
    global _stages
    given = _handoff()
    _stages = deal(
        mesh,
        stages=given.stages,
        layers=config.num_decoder_layers,
        devices=jax.devices(),
        interleave=given.interleave,
        placement=_schedule().placement(given.stages),
        sizes=given.sizes,
        dense=config.first_num_dense_layers,
    )
    return mesh.abstract_mesh


def first_device(_mesh: AbstractMesh) -> Any:
    """Return a stand-in for the first device of a mesh without devices. MaxText only asks for its ``platform``."""
    return SimpleNamespace(platform=_handoff().platform or jax.devices()[0].platform)


def place_state(abstract_state: Any, shardings: Any, checkpoints: Any) -> tuple[Any, Any, Any]:
    """Place the types and shardings of the train state by stage. A checkpoint may hold it in another layout."""
    stages, below = _current(), _handoff().replicate_below
    _specs.update(parameter_specs(shardings))
    if _handoff().zero:
        shardings = spread_optimizer(abstract_state, shardings)
        abstract_state = _laid_out(abstract_state, shardings)
    if below:
        shardings = jax.tree.map(
            lambda x, s: NamedSharding(s.mesh, P()) if x.size < below else s, abstract_state, shardings
        )
        abstract_state = _laid_out(abstract_state, shardings)
    checkpoints = checkpoints and telling(relayout.relaid(checkpoints, stages.layers))
    return stages.structs(abstract_state), stages.shardings(shardings), checkpoints


def _laid_out(types: Any, shardings: Any) -> Any:
    """Return types with other shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), types, shardings)


def init_state(fn: Callable[[], Any], *, in_shardings: None, out_shardings: Any) -> Callable[[], Any]:
    """Return a function that creates the train state, each leaf on its stage."""
    del in_shardings

    def create() -> Any:
        if _handoff().forecast:
            return eval_types(fn, out_shardings)
        state = _current().create(fn, out_shardings)
        write_placement(Path(_handoff().placement), created=state)
        return state

    return create


def everywhere(x: Any) -> Any:
    """Send a scalar to every process. MaxText reads it in all of them."""
    return processes.everywhere(x)


def new_layer(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a layer of an unrolled model. A forecast only needs shapes, so it copies the first layer of each kind."""
    if not _handoff().forecast:
        return make(*args, **kwargs)
    owner = getattr(make, "__self__", None)
    like = next((layer for model, given, layer in _made if model is owner and given == (args, kwargs)), None)
    if like is not None:
        return nnx.clone(like)
    _made.append((owner, (args, kwargs), make(*args, **kwargs)))
    return _made[-1][2]


@functools.lru_cache(maxsize=1)
def _keep_trace(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose trace JAX keeps, for the layers that are like the first."""
    return jax.jit(fn)


def attention(kernel: Callable[..., Any], sums: bool = True) -> Callable[..., Any]:
    """Return a kernel for GPUs; for a forecast, which needs no GPU, a function with its results and residuals.

    cuDNN's kernel returns its ``sums`` beside the result, that of tokamax keeps them to itself. A forecast that
    compiles needs the kernel.
    """
    if not _handoff().forecast or _handoff().target:
        return kernel
    return like_flash_attention if sums else lambda *arrays, **_settings: like_flash_attention(*arrays)[0]


def layer(number: int, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make a layer a task on the submesh of its stage."""
    if _handoff().forecast:
        fn = _keep_trace(fn)
    return multimesh.task(fn, f"layer{number}", mesh=_current().of_layer(number))


def stacks(length: int, rngs: Any = None) -> list[tuple[str, int, Any]]:
    """Return the stacks of scanned layers: one per piece of a stage, where MaxText alone has one of all layers."""
    del length
    return list_stacks(_current().pieces, rngs)


def stack(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make the scan over a stack of layers a task on the submesh of its stage."""
    return apply_stack(_current(), name, fn)


def accumulate(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: dict[str, Any],
    batch: Any,
    *,
    split: Callable[[Any], Any],
    length: int,
) -> tuple[dict[str, Any], Any]:
    """Run MaxText's accumulation over microbatches as the microbatch loop, which cuts as MaxText's ``split`` does."""
    del split
    given = _handoff()

    def home(path: Any) -> Mesh:
        return _current().of_path(path)

    if given.gather_once:
        init = {**init, PARAMETERS: gather(init[PARAMETERS], _specs, home)}
    loop = {"schedule": _auto or _schedule(), "interleave": given.interleave}
    return accumulate_microbatches(body, init, batch, length=length, home=home, **loop)


def gradient_layouts(gradients: Any, shardings: Any) -> Any:
    """Return the layouts of gradients after the loop: those of their parameters or, with ZeRO-2, of their moments.

    XLA then scatters each sum over the devices of the axis ``data``, where it would send the whole sum to all.
    """
    return jax.tree.map(spread_over_data, gradients, shardings) if _handoff().zero > 1 else shardings


def jit(fn: Callable[..., Any], *, donate_argnums: Any = (), **_shardings: Any) -> StepFunction:
    """Compile a step; arguments keep their layouts, and the new state takes that of the old."""
    _set_auto(None)
    return StepFunction(fn, donate_argnums, _handoff(), _set_auto)


def _set_auto(schedule: multimesh.schedules.Auto | None) -> None:
    global _auto
    _auto = schedule
