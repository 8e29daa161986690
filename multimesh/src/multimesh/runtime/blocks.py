"""Stacks at the edge of a plan: one array for the caller, blocks on submeshes inside. No bytes are copied."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from multimesh.core.row_blocks import Blocks, spec_of_blocks


def split(x: Any, stack: Blocks, spec: PartitionSpec, move: Callable[[Any, NamedSharding], Any]) -> list[Any]:
    """Return the blocks of an array. One that lies elsewhere is moved first, to blocks with ``spec``."""
    sharding, target = getattr(x, "sharding", None), stack.sharding(spec)
    if isinstance(sharding, NamedSharding) and sharding.mesh == stack.mesh and stack.has(sharding.spec):
        spec = spec_of_blocks(sharding)
    elif not isinstance(x, jax.Array) or not x.committed or not x.sharding.is_equivalent_to(target, x.ndim):
        x = move(x, target)
    on = {device: n for n, mesh in enumerate(stack.meshes) for device in mesh.devices.flat}
    shards: dict[int, list[Any]] = collections.defaultdict(list)
    for shard in x.addressable_shards:
        shards[on[shard.device]].append(shard.data)
    shape = stack.cut(x.shape)
    return [
        jax.make_array_from_single_device_arrays(
            shape, NamedSharding(mesh, spec, memory_kind=x.sharding.memory_kind), shards[n], dtype=x.dtype
        )
        for n, mesh in enumerate(stack.meshes)
    ]


def join(blocks: Sequence[Any], stack: Blocks) -> jax.Array:
    """Return the array of blocks, which have one spec, each on its submesh."""
    first = blocks[0]
    shape = (*first.shape[: stack.dim], stack.rows * len(blocks), *first.shape[stack.dim + 1 :])
    layout = stack.sharding(first.sharding.spec, first.sharding.memory_kind)
    shards = [shard.data for block in blocks for shard in block.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, layout, shards, dtype=first.dtype)
