"""Copies of arrays between layouts on different devices: shard by shard, never through the host.

Where the shards of both sides fit, each is copied. Elsewhere the sender cuts its shards at the borders of the
receiver's, the pieces go from device to device, and the receiver joins them. Each byte of a shard crosses once, and no
device waits for the calling thread.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from multimesh.core import _compat
from multimesh.core._compat import executables
from multimesh.core.grouping import group
from multimesh.processes.arrays import is_here

Call = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Copy:
    """A copy of one piece: number ``cut`` of the shard of ``source`` becomes number ``join`` of that of ``target``."""

    source: jax.Device
    cut: int
    target: jax.Device
    join: int


@dataclass(frozen=True)
class Resharding:
    """The copies that bring an array from one layout to another."""

    cuts: tuple[int, ...]  # pieces of a sender's shard in each dimension
    joins: tuple[int, ...]  # pieces that a receiver joins
    copies: tuple[Copy, ...]


def plan_resharding(source: jax.sharding.Sharding, target: jax.sharding.Sharding, shape: tuple[int, ...]) -> Resharding:
    """Plan the copies, with cuts at every border of either layout; who has a piece keeps it, others get it in turn."""
    before, after = _parts(source, shape), _parts(target, shape)
    grid = [math.lcm(a, b) for a, b in zip(before, after, strict=True)]
    cuts = tuple(g // a for g, a in zip(grid, before, strict=True))
    joins = tuple(g // b for g, b in zip(grid, after, strict=True))
    pieces = ((d, _places(index, shape, grid, cuts)) for d, index in source.devices_indices_map(shape).items())
    holders = group((at, (device, number)) for device, places in pieces for number, at in enumerate(places))
    turns: collections.Counter[tuple[int, ...]] = collections.Counter()
    copies = []
    for device, index in target.devices_indices_map(shape).items():
        for number, at in enumerate(_places(index, shape, grid, joins)):
            near = [holder for holder in holders[at] if holder[0] == device]
            holder = near[0] if near else holders[at][turns[at] % len(holders[at])]
            turns[at] += not near
            copies.append(Copy(*holder, device, number))
    return Resharding(cuts, joins, tuple(copies))


def _parts(layout: jax.sharding.Sharding, shape: tuple[int, ...]) -> list[int]:
    return [n // max(1, shard) or 1 for n, shard in zip(shape, layout.shard_shape(shape), strict=True)]


def _places(
    index: Sequence[slice], shape: Sequence[int], grid: Sequence[int], counts: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return the places in the grid of the pieces of a shard, the last dimension first."""
    starts = [(part.start or 0) * g // max(1, n) for part, n, g in zip(index, shape, grid, strict=True)]
    return list(itertools.product(*(range(a, a + count) for a, count in zip(starts, counts, strict=True))))


def mover(
    sources: Sequence[jax.sharding.Sharding], targets: Sequence[jax.sharding.Sharding], avals: Sequence[Any]
) -> Call:
    """Return a function that copies arrays between known layouts, to call inside `_compat.explicit_transfers`."""
    others = {
        n: _reshard_function(s, t, tuple(x.shape), x.dtype)
        for n, (s, t, x) in enumerate(zip(sources, targets, avals, strict=True))
        if needs_cutting(s, t, x)
    }
    plain = [n for n in range(len(sources)) if n not in others]
    direct = executables.transfer([sources[n] for n in plain], [targets[n] for n in plain], [avals[n] for n in plain])
    if not others:
        return direct

    def move(*arrays: Any) -> list[Any]:
        results: dict[int, Any] = {n: reshard(arrays[n]) for n, reshard in others.items()}
        if plain:
            results |= zip(plain, direct(*(arrays[n] for n in plain)), strict=True)
        return [results[n] for n in range(len(arrays))]

    return move


def move_arguments(values: Sequence[Any], targets: Sequence[jax.sharding.Sharding]) -> list[Any]:
    """Move arguments of a call from wherever they are to the layouts ``targets``."""
    pairs = list(zip(values, targets, strict=True))
    cut = [n for n, (x, t) in enumerate(pairs) if isinstance(x, jax.Array) and needs_cutting(x.sharding, t, x)]
    direct = [n for n in range(len(pairs)) if n not in cut]
    results = dict(zip(direct, jax.device_put([values[n] for n in direct], [targets[n] for n in direct]), strict=True))
    with _compat.explicit_transfers():
        for n in cut:
            x = values[n]
            results[n] = _reshard_function(x.sharding, targets[n], tuple(x.shape), x.dtype)(x)
    return [results[n] for n in range(len(pairs))]


def needs_cutting(source: jax.sharding.Sharding, target: jax.sharding.Sharding, aval: Any) -> bool:
    """Return whether ``jax.device_put``, which copies shards in their order, would take an array through the host."""
    if len(source.device_set) == 1 or not (isinstance(source, NamedSharding) and isinstance(target, NamedSharding)):
        return False
    shape = tuple(aval.shape)
    return list(source.devices_indices_map(shape).values()) != list(target.devices_indices_map(shape).values())


@dataclass(frozen=True)
class Resharder:
    """The cut of an array at its source, the join at its target, and the `Resharding` between.

    ``piece`` is the type of a piece, with a layout if a piece is the whole array; ``assemble`` makes an array of one
    piece a device. A process compiles ``cut`` or ``join`` only where it has a device of that side.
    """

    resharding: Resharding
    cut: Callable[[Any], Sequence[Any]] | None
    join: Callable[..., Sequence[Any]] | None
    piece: jax.ShapeDtypeStruct
    assemble: Callable[[Sequence[Any]], Any]

    def split(self, x: Any) -> list[dict[jax.Device, Any]]:
        """Return the pieces of an array on this process's devices of its source, by their number and device."""
        return [*map(_shards, self.cut(x) if self.cut else (x,))]

    def join_pieces(self, pieces: Sequence[Any]) -> Any:
        """Return the array of the pieces, in the order of the copies, that are for devices of this process."""
        if self.join is None:
            first = pieces[0]
            return first if first.sharding is self.piece.sharding else self.assemble(pieces)
        count = math.prod(self.resharding.joins)
        return self.join(*(self.assemble(pieces[number::count]) for number in range(count)))[0]


def _shards(x: Any) -> dict[jax.Device, Any]:
    """Return the data of an array on each device of this process."""
    devices = x.sharding.device_set
    if len(devices) == 1:
        return dict.fromkeys(devices, x)
    return {shard.device: shard.data for shard in x.addressable_shards}


@functools.lru_cache(maxsize=4096)
def make_resharder(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Resharder:
    """Return the resharder of an array from the layout ``source`` to ``target``; cuts and joins are compiled once."""
    keys = jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    resharding = plan_resharding(source, target, shape)
    cut, pieces, impl = _cut(source, jax.ShapeDtypeStruct(shape, dtype), resharding.cuts, keys)
    one = [n // j for n, j in zip(target.shard_shape(shape), resharding.joins, strict=True)]
    parts = [n * size for n, size in zip(_parts(target, shape), one, strict=True)]
    between = NamedSharding(_compat.auto(target.mesh), target.spec, memory_kind=target.memory_kind)
    count = math.prod(resharding.joins)
    trailing = pieces[0].shape[len(shape) :]  # of the data of random keys
    struct = jax.ShapeDtypeStruct((*parts, *trailing), pieces[0].dtype, sharding=between)
    join = _join(target, [struct] * count, resharding.joins, impl)
    layout = between if impl is not None or count > 1 else target
    default = SingleDeviceSharding(resharding.copies[0].target).memory_kind
    direct = layout is target and target.num_devices == 1 and target.memory_kind in (None, default)
    piece = jax.ShapeDtypeStruct((*one, *trailing), struct.dtype, sharding=target if direct else None)
    return Resharder(resharding, cut, join, piece, executables.assembler(struct.shape, layout))


@functools.lru_cache(maxsize=1024)
def _reshard_function(source: Any, target: Any, shape: tuple[int, ...], dtype: Any) -> Callable[[Any], Any]:
    """Return a function that moves an array from the layout ``source`` to ``target``."""
    both = make_resharder(source, target, shape, dtype)
    copies = both.resharding.copies
    places = [SingleDeviceSharding(copy.target, memory_kind=target.memory_kind) for copy in copies]

    def reshard(x: Any) -> Any:
        shards = both.split(x)
        return both.join_pieces(jax.device_put([shards[copy.cut][copy.source] for copy in copies], places))

    return reshard


def _cut(source: NamedSharding, aval: Any, cuts: tuple[int, ...], keys: bool) -> tuple[Any, Sequence[Any], Any]:
    """Return a compiled function that cuts every shard, or None; the types of the pieces; the kind of random keys."""
    if math.prod(cuts) == 1 and not keys:
        return None, [aval], None
    impl: list[Any] = []

    def local(x: Any) -> list[Any]:
        sizes = [n // c for n, c in zip(x.shape, cuts, strict=False)]
        starts = itertools.product(*(range(c) for c in cuts))
        return [x[tuple(slice(a * n, a * n + n) for a, n in zip(at, sizes, strict=True))] for at in starts]

    mesh = _compat.auto(source.mesh)

    def cut(x: Any) -> list[Any]:
        if keys:
            impl.append(jax.random.key_impl(x))
            x = jax.random.key_data(x)
        return jax.shard_map(local, mesh=mesh, in_specs=source.spec, out_specs=source.spec, check_vma=False)(x)

    layout = NamedSharding(mesh, source.spec, memory_kind=source.memory_kind)
    compiled, types = _compile(cut, [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=layout)], mesh)
    return compiled, types, impl[0] if keys else None


def _join(target: NamedSharding, pieces: Sequence[Any], joins: tuple[int, ...], impl: Any) -> Any:
    """Return a compiled function that joins the pieces of every shard; None for one piece without random keys."""
    if len(pieces) == 1 and impl is None:
        return None
    mesh = _compat.auto(target.mesh)

    def local(*parts: Any) -> Any:
        blocks = list(parts)
        for d in reversed(range(len(joins))):
            blocks = [jnp.concatenate(blocks[i : i + joins[d]], d) for i in range(0, len(blocks), joins[d])]
        return blocks[0]

    def join(*parts: Any) -> list[Any]:
        specs = (target.spec,) * len(parts)
        x = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=target.spec, check_vma=False)(*parts)
        return [x if impl is None else jax.random.wrap_key_data(x, impl=impl)]

    layout = NamedSharding(mesh, target.spec, memory_kind=target.memory_kind)
    return _compile(join, pieces, target.mesh, [layout])[0]


def _compile(fn: Any, args: Sequence[Any], mesh: Any, layouts: Any = None) -> tuple[Any, Sequence[Any]]:
    """Compile a function for a mesh, or return None if no device of it is here; also the types of the results."""
    jitted = jax.jit(fn, out_shardings=layouts)
    with _compat.abstract_mesh_context(mesh):
        types = jax.eval_shape(fn, *args)
        if not is_here(mesh.devices.flat):
            return None, types
        lowered = jitted.lower(*args)
    return executables.finish(lowered.compile(), lowered, mesh, jitted), types
