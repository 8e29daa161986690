"""Stacks as data: arrays with a block of rows on each submesh."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from multimesh.core.grouping import group
from multimesh.core.specs import axes_of, entry, strip

T = TypeVar("T")
_FIRST: dict[Mesh, Mesh] = {}  # meshes of stacks, to the first submesh


@dataclass(frozen=True)
class Blocks:
    """Blocks of ``rows`` rows along ``dim``, one on each of some submeshes of the same axes, in order.

    To the caller it is one array over the devices of all of them: the first axis of `mesh` has the submeshes.
    """

    dim: int
    rows: int
    meshes: tuple[Mesh, ...]

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First row and end of each block."""
        ends = [n * self.rows for n in range(len(self.meshes) + 1)]
        return tuple(itertools.pairwise(ends))

    @property
    def mesh(self) -> Mesh:
        """The mesh of all submeshes. Its first axis is ``"stage"``, or the like if the submeshes have that."""
        return _join_meshes(self.meshes)

    def sharding(self, spec: PartitionSpec, memory: str | None = None) -> NamedSharding:
        """Return the layout of the whole, if blocks have ``spec`` on their submesh."""
        return _sharding(self, spec, memory)

    def has(self, spec: PartitionSpec) -> bool:
        """Return whether a spec on `mesh` puts each block on its submesh."""
        return len(spec) > self.dim and self.mesh.axis_names[0] in axes_of(spec[self.dim])[:1]

    def cut(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a block of an array."""
        return (*shape[: self.dim], self.rows, *shape[self.dim + 1 :])


@functools.cache
def _join_meshes(meshes: tuple[Mesh, ...]) -> Mesh:
    first = meshes[0]
    axis = next(name for name in ("stage", "stages", "stage_", "stages_") if name not in first.axis_names)
    devices = np.stack([mesh.devices for mesh in meshes])
    mesh = Mesh(devices, (axis, *first.axis_names), axis_types=(AxisType.Auto, *first.axis_types))
    _FIRST[mesh] = first
    return mesh


@functools.cache
def _sharding(stack: Blocks, spec: PartitionSpec, memory: str | None) -> NamedSharding:
    entries = [*spec, *(None for _ in range(stack.dim + 1 - len(spec)))]
    entries[stack.dim] = entry((stack.mesh.axis_names[0], *axes_of(entries[stack.dim])))
    return NamedSharding(stack.mesh, PartitionSpec(*entries), memory_kind=memory)


def is_stacked(mesh: Any) -> bool:
    """Return whether a mesh is that of a stack."""
    return mesh in _FIRST


def spec_of_blocks(sharding: NamedSharding) -> PartitionSpec:
    """Return the spec of a layout; of a stack's, that of its blocks."""
    spec = sharding.spec
    if not is_stacked(sharding.mesh):
        return strip(spec)
    stage, free = sharding.mesh.axis_names[0], PartitionSpec.UNCONSTRAINED
    parts = (axes if axes is free else entry(tuple(a for a in axes_of(axes) if a != stage)) for axes in spec)
    return strip(PartitionSpec(*parts))


def layout_of_block(sharding: NamedSharding) -> NamedSharding:
    """Return a layout; of a stack's, that of its first block."""
    if not is_stacked(sharding.mesh):
        return sharding
    return NamedSharding(_FIRST[sharding.mesh], spec_of_blocks(sharding), memory_kind=sharding.memory_kind)


@dataclass(frozen=True)
class Stacks:
    """The arguments and results of a function that are stacks, by number of the leaf.

    A plan has a leaf for each block in the place of a stack. ``remarks`` has arguments that could not be stacks, or
    whose rows are sent in each call, with the reason.
    """

    arguments: Mapping[int, Blocks] = field(default_factory=dict)
    results: Mapping[int, Blocks] = field(default_factory=dict)
    remarks: Mapping[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.arguments or self.results)


def split_stacks(leaves: Iterable[T], stacks: Mapping[int, Blocks], cut: Callable[[T, Blocks], Iterable[T]]) -> list[T]:
    """Return leaves with the blocks of each stack in its place; ``cut`` makes these."""
    return [part for n, leaf in enumerate(leaves) for part in (cut(leaf, stacks[n]) if n in stacks else (leaf,))]


def repeat(leaf: T, stack: Blocks) -> tuple[T, ...]:
    """Return the leaf once for each block."""
    return (leaf,) * len(stack.meshes)


def numbers(count: int, stacks: Mapping[int, Blocks]) -> list[range]:
    """Return the numbers of the leaves that stand for each of ``count`` leaves when all stacks are in blocks."""
    ranges: list[range] = []
    start = 0
    for n in range(count):
        ranges.append(range(start, start + (len(stacks[n].meshes) if n in stacks else 1)))
        start = ranges[-1].stop
    return ranges


def gather(
    leaves: Sequence[T], count: int, stacks: Mapping[int, Blocks], join: Callable[[Sequence[T], Blocks], T]
) -> Iterator[T]:
    """Yield ``count`` leaves, stacks as ``join`` makes them of their blocks; the inverse of `split_stacks`."""
    for n, at in enumerate(numbers(count, stacks)):
        yield join(leaves[at.start : at.stop], stacks[n]) if n in stacks else leaves[at.start]


def spread_numbers(pairs: Mapping[int, int], counts: tuple[int, int], stacks: Stacks) -> dict[int, int]:
    """Return results and the arguments that they replace, by the numbers of their blocks."""
    results, arguments = numbers(counts[0], stacks.results), numbers(counts[1], stacks.arguments)
    return {
        a: b
        for n, m in pairs.items()
        if len(results[n]) == len(arguments[m])
        for a, b in zip(results[n], arguments[m], strict=True)
    }


def split_array(x: Any, stack: Blocks, spec: PartitionSpec, move: Callable[[Any, NamedSharding], Any]) -> list[Any]:
    """Return the blocks of an array. One that lies elsewhere is moved first, to blocks with ``spec``."""
    sharding, target = getattr(x, "sharding", None), stack.sharding(spec)
    if isinstance(sharding, NamedSharding) and sharding.mesh == stack.mesh and stack.has(sharding.spec):
        spec = spec_of_blocks(sharding)
    elif not isinstance(x, jax.Array) or not x.committed or not x.sharding.is_equivalent_to(target, x.ndim):
        x = move(x, target)
    on = {device: n for n, mesh in enumerate(stack.meshes) for device in mesh.devices.flat}
    shards = group((on[shard.device], shard.data) for shard in x.addressable_shards)
    shape = stack.cut(x.shape)
    return [
        jax.make_array_from_single_device_arrays(
            shape, NamedSharding(mesh, spec, memory_kind=x.sharding.memory_kind), shards[n], dtype=x.dtype
        )
        for n, mesh in enumerate(stack.meshes)
    ]


def join_blocks(blocks: Sequence[Any], stack: Blocks) -> jax.Array:
    """Return the array of blocks, which have one spec, each on its submesh."""
    first = blocks[0]
    shape = (*first.shape[: stack.dim], stack.rows * len(blocks), *first.shape[stack.dim + 1 :])
    layout = stack.sharding(first.sharding.spec, first.sharding.memory_kind)
    shards = [shard.data for block in blocks for shard in block.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, layout, shards, dtype=first.dtype)
