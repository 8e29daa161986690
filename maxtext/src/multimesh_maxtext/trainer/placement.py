"""Gives each layer, parameter and optimizer moment of a MaxText model its stage."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh
from multimesh_maxtext.checkpoint_folder import split_layer_name
from multimesh_maxtext.trainer.processes import absent, has_device

_REPLICATED, _GATHERED = "data", "fsdp"
"""MaxText's axes of the mesh along which parameters are copies, and along which devices share them."""

_AFTER_LAYERS = {"decoder_norm", "logits_dense"}


@dataclass(frozen=True)
class Stages:
    """A submesh per stage. A piece has contiguous layers, and the schedule's placement gives each piece its stage."""

    meshes: tuple[Mesh, ...]  # one a stage, equal but for their devices
    layers: int  # number of decoder layers
    interleave: int = 1  # pieces a stage
    # the stage of each piece, as ``multimesh.schedules.Schedule.placement`` gives it; by default in turn
    placement: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()  # layers of each piece; by default all have as many
    dense: int = 0  # number of the first layers that are dense, where MaxText counts those and the others apart

    @functools.cached_property
    def pieces(self) -> list[range]:
        """Layers of each piece, in the order of the model."""
        number = len(self.meshes) * self.interleave
        ends = [0, *itertools.accumulate(self.sizes or (self.layers // number,) * number)]
        return [range(start, end) for start, end in itertools.pairwise(ends)]

    def of_layer(self, number: int) -> Mesh:
        """Return the submesh of a layer, or of the piece that begins with it."""
        on = self.placement or range(len(self.meshes))
        piece = next(i for i, layers in enumerate(self.pieces) if number in layers)
        return self.meshes[on[piece % len(on)]]

    def of_path(self, path: Any) -> Mesh:
        """Return the submesh of a leaf of the train state: a parameter, its moments, a random number generator's state.

        The final norm and the logits lie with the last layer; all else outside of layers (the embedding, counters)
        lies with the first.
        """
        names = name_path(path)
        for kind, numbers in filter(None, map(split_layer_name, names)):
            if numbers:  # a stack of layers lies where its first one does
                return self.of_layer(numbers[0] + (self.dense if kind == "moe_layers" else 0))
        return self.of_layer(self.layers - 1 if _AFTER_LAYERS.intersection(names) else 0)

    def shardings(self, tree: Any) -> Any:
        """Put each ``NamedSharding`` of a tree on the submesh of its leaf."""

        def move(path: Any, sharding: NamedSharding) -> NamedSharding:
            return NamedSharding(self.of_path(path), sharding.spec, memory_kind=sharding.memory_kind)

        return jax.tree_util.tree_map_with_path(move, tree, is_leaf=lambda x: isinstance(x, NamedSharding))

    def create(self, fn: Callable[[], Any], shardings: Any) -> Any:
        """Compute ``fn()``, each leaf on its own devices; no device holds the whole result.

        ``fn`` is traced once and compiled once a stage: XLA drops the computations for other stages.
        """
        layouts = jax.tree.leaves(shardings)
        closed, shape = jax.make_jaxpr(fn, return_shape=True)()
        leaves = [None if has_device(s) else absent(x, s) for x, s in zip(closed.out_avals, layouts, strict=True)]
        for mesh in self.meshes:
            indices = [i for i, layout in enumerate(layouts) if layout.mesh == mesh and leaves[i] is None]

            def initialize(indices: Sequence[int] = indices) -> list[Any]:
                results = jaxpr_as_fun(closed)()
                return [results[i] for i in indices]

            arrays = jax.jit(initialize, out_shardings=[layouts[i] for i in indices])() if indices else ()
            for i, leaf in zip(indices, arrays, strict=True):
                leaves[i] = leaf
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)


def stage_meshes(mesh: Mesh, stages: int, devices: Sequence[jax.Device]) -> tuple[Mesh, ...]:
    """Make the submeshes of all stages from that of the first, which has the first ``1 / stages`` of the devices."""
    number = {device: i for i, device in enumerate(devices)}
    indices, every = np.vectorize(number.__getitem__)(mesh.devices), np.array(devices, object)
    grids = (every[indices + stage * mesh.size] for stage in range(stages))
    return tuple(Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types) for grid in grids)


@dataclass(frozen=True)
class Share:
    """Random number generators of some of the layers, the same as in one stack of all layers."""

    every: nnx.Rngs
    layers: range

    def fork(self, *, split: int) -> nnx.Rngs:
        """Give each of the ``split`` layers of this share its own, stacked."""
        graph, state = nnx.split(self.every)
        return nnx.merge(graph, jax.tree.map(lambda x: x[self.layers.start : self.layers.start + split], state))


def list_stacks(pieces: Sequence[range], rngs: nnx.Rngs | None) -> list[tuple[str, int, Share | None]]:
    """Return the name of each piece's stack, which tells `Stages.of_path` its stage, its layers, and their source."""
    every = rngs.fork(split=pieces[-1].stop) if rngs else None
    return [(f"layers_{p.start}_{p.stop - 1}", len(p), Share(every, p) if every else None) for p in pieces]


def lay_out(types: Any, shardings: Any) -> Any:
    """Return types with their shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), types, shardings)


def spread_over_data(x: Any, sharding: NamedSharding) -> NamedSharding:
    """Return the layout of an array over the axis ``data`` too, or as it is if that divides no dimension of it."""
    sizes = sharding.mesh.shape
    axes = [*map(_axes, sharding.spec), *[()] * (x.ndim - len(sharding.spec))]
    for dim in sorted(range(x.ndim), key=lambda dim: len(axes[dim])):  # those that are whole first
        if x.shape[dim] % (math.prod(sizes[axis] for axis in axes[dim]) * sizes[_REPLICATED]) == 0:
            axes[dim] = (*axes[dim], _REPLICATED)
            break
    return NamedSharding(sharding.mesh, P(*(names or None for names in axes)), memory_kind=sharding.memory_kind)


def gather(parameters: Any, specs: Mapping[tuple[str, ...], P], home: Callable[[Any], Mesh]) -> Any:
    """Return parameters with each array whole along the axis ``fsdp``, gathered by a task on its submesh, ``home``."""

    def gather_leaf(path: Any, x: Any) -> Any:
        spec = specs[name_path(path)]
        gathered = P(*(tuple(axis for axis in _axes(part) if axis != _GATHERED) or None for part in spec))
        if gathered == spec:
            return x
        return multimesh.task(lambda x: jax.lax.with_sharding_constraint(x, gathered), "gather", mesh=home(path))(x)

    return jax.tree_util.tree_map_with_path(gather_leaf, parameters)


def _axes(part: Any) -> tuple[str, ...]:
    """Return the axes over which a layout shards a dimension."""
    return part if isinstance(part, tuple) else (part,) if part else ()


def name_path(path: Any) -> tuple[str, ...]:
    """Return the names on the path of a leaf."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def write_placement(file: Path, **states: Any) -> None:
    """Add train states to the file, each under its name: ``arrays`` (path to device ids), ``bytes`` (by device id)."""
    placements = json.loads(file.read_text()) if file.exists() else {}
    placements |= {name: _describe(state) for name, state in states.items()}
    file.write_text(json.dumps(placements, indent=1))


def _describe(state: Any) -> dict[str, Any]:
    leaves, sizes = jax.tree_util.tree_leaves_with_path(state), dict[int, int]()
    arrays = {jax.tree_util.keystr(path): sorted(device.id for device in x.sharding.device_set) for path, x in leaves}
    for x in jax.live_arrays():
        if not x.is_deleted():
            # Not from x.addressable_shards: those would keep the buffers alive, and the step could not reuse them.
            size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for device in x.sharding.addressable_devices:
                sizes[device.id] = sizes.get(device.id, 0) + size
    return {"arrays": arrays, "bytes": sizes}
